"""What was made of a model in memory before `em.parallelize` works on, or stops with one sentence: never in silence."""

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import expertmesh as em
from expertmesh.config.errors import InputError
from expertmesh.state.model_view import mesh_of
from tests.integrations.test_other_code import LORA, small_batch
from tests.support.errors import refused
from tests.support.list_models import write_list_model
from tests.support.models import tiny_model
from tests.support.ranks import shared_ranks
from tests.support.reference import padded, rows_of_step, whole, worst

pytestmark = pytest.mark.usefixtures("cache_of_model_code")


def _train_step(model: Any, optimizer: Any) -> None:
    mesh = mesh_of(model)
    batch = padded(rows_of_step(0, ())[mesh.data_rank :: mesh.layout.data_ranks])
    em.forward_backward(model, [batch], target_tokens=100)
    optimizer.step()


def _step(model: nn.Module, optimizer: Any) -> None:
    optimizer.step()


def _scheduler(model: nn.Module, optimizer: Any) -> None:
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0).optimizer.zero_grad()


def _clip(model: nn.Module, optimizer: Any) -> None:
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)


def _given_gradients(model: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"][0].grad = torch.zeros(())


def _in_a_loss(model: nn.Module, optimizer: Any) -> None:
    decay = sum(parameter.square().sum() for parameter in optimizer.param_groups[0]["params"])
    decay.backward() if decay.requires_grad else optimizer.zero_grad()  # with lora= the base was frozen


USES: list[Callable[[Any, Any], None]] = [_train_step, _step, _scheduler, _clip, _given_gradients, _in_a_loss]


def _optimizers_from_before(layout: dict[str, int], list_model: nn.Module) -> list[tuple[str, str]]:
    mesh = em.init_mesh(em.ParallelConfig(**{"ep": 1, **layout}))  # type: ignore[arg-type]
    models: list[tuple[Any, dict[str, Any]]] = [
        (tiny_model("qwen3_moe"), {}),
        (tiny_model("qwen3_moe", tie_word_embeddings=True), {}),
        (tiny_model("qwen3_moe"), {"lora": em.LoraConfig(r=2)}),
        (peft.get_peft_model(tiny_model("qwen3_moe"), LORA), {}),  # type: ignore[arg-type]
    ]
    found = []
    for model, options in [*models, *[(list_model, {})] * ("ep" in layout)]:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3)
        kept = copy.deepcopy(trained[0].detach())
        sharded = em.parallelize(model, mesh, **options)
        for use in USES:
            with pytest.raises(InputError) as caught:
                use(sharded, optimizer)
            found.append((caught.value.key, str(caught.value)))
        assert torch.equal(trained[0], kept)  # what it was may still be read
        sharded_optimizer = torch.optim.AdamW([p for p in sharded.parameters() if p.requires_grad], lr=1e-3)
        sharded_optimizer.zero_grad()
    return found


@pytest.mark.slow_cases(r"(1-layout0|2-layout1)", why="two layouts of two ranks stay")
@pytest.mark.parametrize(("world", "layout"), [(1, {"ep": 1}), (2, {"ep": 2}), (2, {"tp": 2}), (2, {"pp": 2})])
def test_an_optimizer_from_before_stops_before_it_trains_nothing(
    world: int, layout: dict[str, int], tmp_path: Path
) -> None:
    for found in shared_ranks(_optimizers_from_before, world, layout, write_list_model(tmp_path / "list")):
        assert {key for key, _ in found} == {"model.parameter-from-before"}
        assert all("model.parameters() after em.parallelize" in sentence for _, sentence in found)


def _freed() -> None:
    model: Any = tiny_model("qwen3_moe")
    held = model.model.norm.weight
    references = [weakref.ref(parameter) for parameter in model.parameters()]
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=2)))
    gc.collect()
    assert [found for reference in references if (found := reference()) is not None] == [held]
    held = references[0]
    assert not any(reference() is not None for reference in references)


def test_parameters_from_before_that_nobody_holds_are_freed() -> None:
    shared_ranks(_freed, 2)


def _averaged(model: Any, average: AveragedModel, batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average.update_parameters(model)
    for batch in batches:
        em_loss = em.causal_lm_loss if hasattr(model, "reshard") else _loss
        em_loss(model, batch, target_tokens=50).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return whole(dict(average.module.named_parameters()))


def _loss(model: Any, batch: dict[str, torch.Tensor], target_tokens: int) -> torch.Tensor:
    loss: torch.Tensor = model(**batch, num_items_in_batch=target_tokens).loss
    return loss


def _averages() -> None:
    rows = [rows_of_step(step, ()) for step in range(3)]
    found = []
    for is_sharded in (False, True):
        model: Any = tiny_model("qwen3_moe")
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        if is_sharded:
            mesh = em.init_mesh(em.ParallelConfig(ep=2))
            em.parallelize(model, mesh)
            em.parallelize(average.module, mesh)
        mine = slice(dist.get_rank(), None, 2) if is_sharded else slice(None)
        found.append(_averaged(model, average, [padded(step[mine]) for step in rows]))
    assert worst(found[1], found[0])[0] <= 1e-5
    assert worst(found[1], whole(dict(tiny_model("qwen3_moe").named_parameters())))[0] > 1e-4


def test_an_average_from_before_is_parallelized_beside_its_model() -> None:
    shared_ranks(_averages, 2)


def _compiled() -> None:
    mesh = em.init_mesh(em.ParallelConfig(ep=2))
    model: Any = tiny_model("qwen3_moe")
    compiled = torch.compile(model, backend="eager")
    with refused("model.compiled", naming="compile=True"):
        em.parallelize(compiled, mesh)  # type: ignore[arg-type]
    for part in ("", "model.layers.1"):
        other: Any = tiny_model("qwen3_moe")
        other.get_submodule(part).compile(backend="eager")
        with refused("model.compiled", naming=part or "Qwen3MoeForCausalLM"):
            em.parallelize(other, mesh)
    em.parallelize(model, mesh)
    inputs = {key: value for key, value in small_batch().items() if key != "labels"}
    with refused("model.compiled", naming="call the model itself"):
        compiled(**inputs)
    assert model(**inputs).logits.isfinite().all()


def test_a_compiled_model_is_one_sentence_and_the_model_itself_runs() -> None:
    shared_ranks(_compiled, 2)


def _calls_of_hooks(model: Any, run: Callable[[Any], torch.Tensor]) -> dict[str, list[int]]:
    """How often each module's forward and backward hooks are called."""
    calls = {name: [0, 0] for name, _ in model.named_modules()}

    def count(name: str, which: int) -> Callable[..., None]:
        def hook(*args: Any) -> None:
            calls[name][which] += 1

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(count(name, 0))
        if name.endswith(("_proj", "norm", "mlp", "experts")):  # modules that return one tensor
            module.register_full_backward_hook(count(name, 1))
    run(model).backward()
    return calls


def _hooks_of_modules() -> None:
    expected = _calls_of_hooks(tiny_model("qwen3_moe"), lambda model: model(**small_batch()).loss)

    def run(model: Any) -> torch.Tensor:
        em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=2)))
        return em.like_ddp(model)(**small_batch()).loss  # type: ignore[no-any-return]

    found = _calls_of_hooks(tiny_model("qwen3_moe"), run)
    assert sum(forward for forward, _ in found.values()) > 20
    # What is inside the experts is called by the formula, or not at all.
    inside = {name for name in found if ".experts." in name}
    assert {n: c for n, c in found.items() if n not in inside} == {n: c for n, c in expected.items() if n not in inside}


def test_hooks_of_modules_are_called_as_before() -> None:
    shared_ranks(_hooks_of_modules, 2)


def _lost(list_model: nn.Module) -> None:
    mesh = em.init_mesh(em.ParallelConfig(ep=2))

    def hook(*args: Any) -> None: ...

    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        model: Any = tiny_model("qwen3_moe")
        handle = getattr(model.model.norm.weight, register)(hook)
        with refused("model.attached-to-parameter", naming="model.norm.weight has hooks"):
            em.parallelize(model, mesh)
        handle.remove()
        em.parallelize(model, mesh)
    model = tiny_model("qwen3_moe")
    if mesh.rank == 0:  # the other would wait for it
        _loss(model, small_batch(), 10).backward()
    with refused("model.attached-to-parameter", naming="has a gradient"):
        em.parallelize(model, mesh)
    name = next(name for name, _ in list_model.named_modules() if ".experts.0." in name)
    list_model.get_submodule(name).register_forward_hook(hook)
    with refused("model.hooks-of-replaced-module", naming=name):
        em.parallelize(list_model, mesh)  # type: ignore[arg-type]
    wrapped: Any = peft.get_peft_model(tiny_model("qwen3_moe"), LORA)
    layer = next(name for name, module in wrapped.named_modules() if name.endswith("q_proj.lora_A"))
    wrapped.get_submodule(layer).register_forward_hook(hook)
    with refused("model.hooks-of-replaced-module", naming=layer):
        em.parallelize(wrapped, mesh)


def test_hooks_and_gradients_that_sharding_would_lose_are_refused(tmp_path: Path) -> None:
    shared_ranks(_lost, 2, write_list_model(tmp_path / "list"))


def _after() -> None:
    model: Any = em.parallelize(tiny_model("qwen3_moe"), em.init_mesh(em.ParallelConfig(ep=2)))
    called = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))
    em.causal_lm_loss(model, small_batch(), target_tokens=50).backward()
    assert sorted(called) == sorted(name for name, _ in model.named_parameters())


def test_hooks_of_parameters_registered_after_are_called_once_each() -> None:
    shared_ranks(_after, 2)
