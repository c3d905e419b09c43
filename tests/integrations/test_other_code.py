"""What other libraries do with a sharded model is right, or one sentence with a key, the same on every rank."""

import copy
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.distributed.configuration_utils import DistributedConfig

import expertmesh as em
from expertmesh.config.errors import InputError
from expertmesh.integrations.trainer import ShardedTrainer
from expertmesh.state.shards import local_tensor
from tests.support.errors import refused
from tests.support.models import tiny_model
from tests.support.ranks import shared_ranks
from tests.support.reference import full, padded, rows_of_step

LORA = peft.LoraConfig(target_modules=["q_proj"], target_parameters=["experts.down_proj"], task_type="CAUSAL_LM")


def _sharded(family: str = "qwen3_moe", **layout: Any) -> Any:
    return em.parallelize(tiny_model(family), em.init_mesh(em.ParallelConfig(**(layout or {"ep": 2}))))  # type: ignore[arg-type]


def small_batch() -> dict[str, torch.Tensor]:
    return padded(rows_of_step(0, ())[dist.get_rank() :: dist.get_world_size()])


def _join_accelerate() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {name: str(value) for name, value in ranks.items()} | {"ACCELERATE_USE_CPU": "true"}


def _labels(model: Any) -> None:
    model(**small_batch())


def _labels_in_evaluation(model: Any) -> None:
    loss = model.eval()(**small_batch()).loss
    assert float(loss.detach()) > 0  # it may be looked at
    loss.backward()


def _labels_by_place(model: Any) -> None:
    batch = small_batch()
    model(batch["input_ids"], batch["attention_mask"], None, None, None, batch["labels"])


def _prepare(model: Any) -> None:
    _join_accelerate()
    Accelerator(cpu=True).prepare(model)


def _prepare_with_fsdp(model: Any) -> None:
    _join_accelerate()
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def _trainer(model: Any) -> None:
    _join_accelerate()
    rows: Any = [{key: value[0] for key, value in padded([row]).items()} for row in rows_of_step(0, ())]
    args = TrainingArguments(output_dir=tempfile.mkdtemp(), use_cpu=True, max_steps=1, report_to=[])
    Trainer(model=model, args=args, train_dataset=rows).train()


def _save_pretrained(model: Any) -> None:
    model.save_pretrained(tempfile.mkdtemp())


def _torch_save(model: Any) -> None:
    torch.save(model.state_dict(), Path(tempfile.mkdtemp(), "model.pt"))


WHAT: dict[Callable[[Any], Any], tuple[str, str]] = {
    _labels: ("model.labels-with-summed-gradients", "em.like_ddp(model)"),
    _labels_by_place: ("model.labels-with-summed-gradients", "em.causal_lm_loss"),
    _labels_in_evaluation: ("model.labels-with-summed-gradients", "em.causal_lm_loss"),
    _prepare: ("model.sharded-accelerate", "em.like_ddp(model)"),
    _prepare_with_fsdp: ("model.sharded-accelerate", "em.like_ddp(model)"),
    _trainer: ("model.sharded-accelerate", "em.trainer"),
    DistributedDataParallel: ("model.sharded-ddp", "em.like_ddp"),
    _torch_save: ("model.sharded-torch-save", "em.save_model"),
    _save_pretrained: ("model.sharded-save-pretrained", "em.save_model"),
    lambda model: model.push_to_hub("somebody/something"): ("model.sharded-push-to-hub", "em.save_model"),
    lambda model: peft.get_peft_model(model, LORA): ("model.sharded-peft", "em.lora_from_peft"),
    lambda model: model.add_adapter(LORA): ("model.sharded-peft", "em.lora_from_peft"),
    lambda model: model.load_adapter("somewhere"): ("model.sharded-peft", "em.lora_from_peft"),
}  # fmt: skip


def _sentences() -> list[tuple[str, str]]:
    """What each of `WHAT` ends with on this rank."""
    found = []
    for use in WHAT:
        with pytest.raises(InputError) as caught:
            use(_sharded())
        found.append((caught.value.key, str(caught.value)))
    return found


def test_what_cannot_be_right_is_one_sentence_on_every_rank() -> None:
    first, second = shared_ranks(_sentences, 2)
    assert first == second
    for (key, sentence), (expected, naming) in zip(first, WHAT.values(), strict=True):
        assert key == expected, sentence
        assert naming in sentence


def _fully_shard_again() -> None:
    for part in (
        lambda model: model,
        lambda model: model.model.layers[1],
        lambda model: model.model.layers[1].self_attn,
    ):
        with pytest.raises((AssertionError, TypeError)):  # torch's own
            fully_shard(part(_sharded()))


def test_torch_itself_refuses_to_shard_twice() -> None:
    shared_ranks(_fully_shard_again, 2)


def _as_ever() -> None:
    model = _sharded()
    batch = small_batch()
    with torch.no_grad():
        assert float(model(**batch).loss) > 0
    logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    (logits.logsumexp(-1).sum() / 100).backward()
    assert model.model.layers[0].mlp.experts.down_proj.grad is not None
    assert type(model).__name__ == "FSDPQwen3MoeForCausalLM"
    assert not hasattr(model, "peft_config")
    model._is_accelerate_prepared = True  # by code that knows what it does
    assert model._is_accelerate_prepared
    # DCP writes the state as it is.
    directory = tempfile.mkdtemp()
    torch.distributed.checkpoint.save(model.state_dict(), checkpoint_id=f"{directory}/dcp-{os.getppid()}")


def test_evaluation_losses_of_ones_own_and_dcp_work_as_ever() -> None:
    shared_ranks(_as_ever, 2)


def _alone() -> None:
    model = _sharded(ep=1)
    model(**small_batch()).loss.backward()


def test_one_data_rank_has_nothing_to_average() -> None:
    shared_ranks(_alone, 1)


def _clipped(layout: dict[str, int]) -> None:
    """torch's clipping and ours, on the same gradients."""
    model = em.like_ddp(_sharded(**layout))
    model(**small_batch()).loss.backward()
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    for max_norm, norm_type in [(0.5, 2.0), (0.1, float("inf")), (1e6, 1.0)]:
        results = []
        for clip, of in ((em.clip_grad_norm_, model), (torch.nn.utils.clip_grad_norm_, list(model.parameters()))):
            for name, parameter in model.named_parameters():
                parameter.grad = before[name].clone()
            norm: Any = clip(of, max_norm, norm_type)
            results.append((float(norm), {name: full(p.grad) for name, p in model.named_parameters()}))
        (ours, own), (theirs, others) = results
        assert theirs == pytest.approx(ours, rel=1e-5)
        for name, gradient in own.items():
            torch.testing.assert_close(others[name], gradient, rtol=1e-5, atol=1e-9)


def _clipped_by_a_trainer(spoilt: float) -> None:
    """One element of one expert's gradient is spoilt; torch clips the gradients of the unsharded model."""
    initial: Any = tiny_model("qwen3_moe")
    model = em.parallelize(copy.deepcopy(initial), em.init_mesh(em.ParallelConfig(ep=2)))
    for each, holds_it in ((initial, True), (model, dist.get_rank() == 0)):
        for parameter in each.parameters():
            parameter.grad = torch.ones_like(parameter)
        if holds_it:
            local_tensor(each.get_parameter("model.layers.1.mlp.experts.down_proj").grad)[0, 0, 0] = spoilt
    expected = torch.nn.utils.clip_grad_norm_(initial.parameters(), 0.5)
    trainer: Any = SimpleNamespace(args=SimpleNamespace(max_grad_norm=0.5))
    norm = ShardedTrainer._clip_grad_norm(trainer, model)
    torch.testing.assert_close(norm, expected, equal_nan=True)
    for name, parameter in initial.named_parameters():
        torch.testing.assert_close(full(model.get_parameter(name).grad), parameter.grad, equal_nan=True)


@pytest.mark.parametrize("spoilt", [float("inf"), float("nan"), 1e6, 1.0])
def test_a_trainer_clips_gradients_as_torch_does_when_some_are_not_finite(spoilt: float) -> None:
    shared_ranks(_clipped_by_a_trainer, 2, spoilt)


def _every_layout() -> None:
    for layout in ({"ep": 2}, {"ep": 4}, {"ep": 2, "replicate": 2}):
        _clipped(layout)


@pytest.mark.slow(why="parallel/test_gradients.py compares clipped norms")
def test_torchs_clipping_is_ours_in_every_layout() -> None:
    shared_ranks(_every_layout, 4)


def _plain_models_are_clipped_as_ever() -> None:
    _sharded()
    plain: Any = tiny_model("qwen3_moe")
    plain(**padded(rows_of_step(0, ()))).loss.backward()
    expected = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in plain.parameters()]))
    assert float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)) == pytest.approx(float(expected), rel=1e-6)
    scaled = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in plain.parameters()]))
    assert float(scaled) == pytest.approx(0.5, rel=1e-5)


def test_other_models_are_clipped_as_ever() -> None:
    shared_ranks(_plain_models_are_clipped_as_ever, 2)


def _stages() -> None:
    model = _sharded(ep=1, pp=2)
    batch = padded(rows_of_step(0, ()))
    with refused("layout.pp-needs-forward-backward", naming="forward_backward"):
        model(**batch)
    em.forward_backward(model, [batch], target_tokens=em.count_targets(batch["labels"]))
    with refused("layout.pp-clipping", naming="em.clip_grad_norm_"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def test_a_stage_is_not_clipped_alone() -> None:
    shared_ranks(_stages, 2)


def _copied() -> None:
    """The library's own way through the model: what is guarded has to be of it alone."""
    model = _sharded()
    state = copy.deepcopy(model.state_dict())
    model.load_state_dict(state)


def test_a_state_dict_goes_back_into_its_model() -> None:
    shared_ranks(_copied, 2)


def _already_sharded(source: Path) -> list[tuple[str, str]]:
    ours = _sharded()
    whole: Any = tiny_model("qwen3_moe")
    mesh = em.init_mesh(em.ParallelConfig(ep=2))
    norm = whole.model.norm
    norm.weight = torch.nn.Parameter(distribute_tensor(norm.weight.detach(), mesh.sharding("dense"), [Replicate()]))
    models = [ours, whole, fully_shard(tiny_model("qwen3_moe"))]
    os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank()), "WORLD_SIZE": "2"}
    for sizes in ({"fsdp_size": 2}, {"fsdp_size": 2, "ep_size": 2}, {"tp_size": 2, "tp_plan": "auto"}):
        config = DistributedConfig(**sizes)  # type: ignore[arg-type]
        models.append(AutoModelForCausalLM.from_pretrained(source, distributed_config=config))
    found = []
    for model in models:
        with pytest.raises(InputError) as caught:
            em.parallelize(model, mesh)
        found.append((caught.value.key, str(caught.value)))
    return found


def test_a_model_that_is_sharded_already_is_one_sentence_on_every_rank(tmp_path: Path) -> None:
    model: Any = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    first, second = shared_ranks(_already_sharded, 2, tmp_path)
    assert first == second
    expected = ["parallelized already", "model.norm.weight is a DTensor", "is a DTensor"] + [
        "transformers has sharded"
    ] * 3
    for (key, sentence), naming in zip(first, expected, strict=True):
        assert key == "model.already-sharded"
        assert naming in sentence
