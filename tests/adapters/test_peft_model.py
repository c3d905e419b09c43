"""`em.parallelize(PeftModel)`: trains as stock PEFT does unsharded, and saves what stock PEFT reads; or is refused.

A refusal leaves the PeftModel as it was.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.integrations.peft import MIN_PEFT_VERSION

import expertmesh as em
from expertmesh.adapters import peft_model
from expertmesh.adapters.peft_model import peft_adapters
from expertmesh.config.errors import IntegrityError
from expertmesh.distributed.mesh import Mesh
from tests.adapters.reference import AdapterDistance, PeftRun, tiny_peft_run, train_adapters
from tests.adapters.test_save import logits_of, peft_error
from tests.families.tiny import random_model
from tests.support.errors import refused, refused_on_ranks
from tests.support.models import tiny_model
from tests.support.ranks import shared_ranks
from tests.support.reference import full

PROMPT = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)  # type: ignore[arg-type]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def _train(run: PeftRun, parallel: dict[str, int], directory: Path) -> AdapterDistance:
    def after(model: Any, mesh: Mesh) -> Tensor:
        em.save_adapter(model, directory)
        return logits_of(model)

    return train_adapters(run, em.ParallelConfig(**parallel), as_peft_model=True, after=after)


@pytest.mark.slow_cases(r"(deepseek_v3|llama4|gpt_oss)-.*", why="attention and experts of one family stay")
@pytest.mark.parametrize(
    ("family", "world", "parallel"),
    [
        ("qwen3_moe", 2, {"ep": 2}),
        ("gpt_oss", 4, {"ep": 2, "replicate": 2}),
        ("deepseek_v3", 4, {"ep": 4}),
        ("llama4", 2, {"ep": 2}),
    ],
)
def test_it_trains_and_saves_as_stock_peft(family: str, world: int, parallel: dict[str, int], tmp_path: Path) -> None:
    modules = {"llama4": (["q_proj"], ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"])}
    run = tiny_peft_run(family, tmp_path / "start", *modules.get(family, ((), ())))
    for distance in shared_ranks(_train, world, run, parallel, tmp_path / "saved"):
        distance.check(1e-5)
        assert peft_error(run, tmp_path / "saved", distance.after) <= 1e-5


def _scrambled(run: PeftRun, directory: Path) -> AdapterDistance:
    values = peft_model._values

    def swapped(model: nn.Module, adapter: str) -> Any:
        """Two experts of one B in each other's place."""
        for key, parameter in values(model, adapter):
            if key.endswith("mlp.experts.lora_B.weight"):
                parameter.data[:, [0, 1]] = parameter.data[:, [1, 0]]
            yield key, parameter

    peft_model._values = swapped  # type: ignore[assignment]
    return _train(run, {"ep": 2}, directory)


def test_experts_in_each_others_place_are_caught(tmp_path: Path) -> None:
    run = tiny_peft_run("qwen3_moe", tmp_path / "start")
    for distance in shared_ranks(_scrambled, 2, run, tmp_path / "saved"):
        with pytest.raises(AssertionError, match="AdapterDistance"):
            distance.check(1e-5)


def _config(**changes: Any) -> peft.LoraConfig:
    said: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"], "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**{**said, **changes})


def _peft_model(model: Any = None, **changes: Any) -> Any:
    return peft.get_peft_model(model or tiny_model("qwen3_moe"), _config(**changes))  # type: ignore[arg-type]


def _two() -> Any:
    model = _peft_model()
    model.add_adapter("other", _config())
    return model


def _merged() -> Any:
    model = _peft_model()
    model.merge_adapter()
    return model


def _base_trains() -> Any:
    model = _peft_model()
    model.base_model.model.model.norm.weight.requires_grad_(True)
    return model


def _half_frozen() -> Any:
    model = _peft_model()
    model.base_model.model.model.layers[0].self_attn.q_proj.lora_A["default"].weight.requires_grad_(False)
    return model


def _scaled() -> Any:
    model = _peft_model()
    model.base_model.model.model.layers[0].self_attn.q_proj.scaling["default"] = 7.0
    return model


def _vision() -> Any:
    model: Any = random_model("Glm4vMoeForConditionalGeneration", "glm4v_moe")
    return _peft_model(model, target_modules=["q_proj", "qkv"])


def _other(config: peft.PeftConfig) -> Any:
    return peft.get_peft_model(tiny_model("qwen3_moe"), config)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "key", "naming"),
    [
        (lambda: _peft_model(use_dora=True), "adapter.unsupported-option", "use_dora"),
        (lambda: _peft_model(modules_to_save=["norm"]), "adapter.unsupported-option", "modules_to_save"),
        (lambda: _peft_model(trainable_token_indices=[4]), "adapter.unsupported-option", "trainable_token_indices"),
        (lambda: _peft_model(bias="lora_only"), "adapter.unsupported-option", "bias"),
        (lambda: _peft_model(inference_mode=True), "adapter.unsupported-option", "inference_mode"),
        (lambda: _peft_model(init_lora_weights="pissa"), "adapter.changes-base", "pissa"),
        (lambda: _peft_model(target_modules=["embed_tokens", "q_proj"]), "adapter.unsupported-peft-model", "Embedding"),
        (_vision, "adapter.unsupported-target", "visual"),
        (_two, "adapter.unsupported-peft-model", "2 adapters"),
        (_merged, "adapter.unsupported-peft-model", "merged"),
        (_base_trains, "adapter.unsupported-peft-model", "norm.weight trains"),
        (_half_frozen, "adapter.unsupported-peft-model", "is frozen"),
        (_scaled, "adapter.unsupported-peft-model", "scaled"),
        (lambda: _other(peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])), "adapter.not-lora", "LoRA"),
        (lambda: _other(PROMPT), "adapter.not-lora", "LoRA"),
    ],
)  # fmt: skip
def test_what_is_no_plain_adapter_is_refused_with_the_model_as_it_was(
    make: Callable[[], Any], key: str, naming: str
) -> None:
    model = make()
    names, state = [name for name, _ in model.named_modules()], copy.deepcopy(model.state_dict())
    with refused(key, naming=naming):
        peft_adapters(model, None)
    assert [name for name, _ in model.named_modules()] == names
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_adapters_beside_adapters_are_refused_and_a_model_without_is_left_alone() -> None:
    with refused("adapter.unsupported-peft-model", naming="lora is given"):
        peft_adapters(_peft_model(), em.LoraConfig())
    assert peft_adapters(tiny_model("qwen3_moe"), em.LoraConfig()) is None


def _injected_by_transformers() -> None:
    """`model.add_adapter` of transformers leaves the model its class."""
    model: Any = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    torch.manual_seed(0)
    model.add_adapter(_config(target_parameters=EXPERTS, lora_dropout=0.0))
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters() if "lora_A" in name}
    sharded = em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=2)))
    assert sharded is model
    assert not hasattr(model, "peft_config")
    name = "model.layers.1.self_attn.o_proj.lora_A"
    assert torch.equal(full(model.get_parameter(name)), values[f"{name}.default.weight"])
    assert {parameter.dtype for parameter in model.parameters() if parameter.requires_grad} == {
        next(iter(values.values())).dtype
    }


@pytest.mark.skipif(
    Version(peft.__version__) < Version(MIN_PEFT_VERSION), reason="this transformers asks for a newer PEFT"
)
def test_adapters_that_transformers_has_injected_are_taken_over() -> None:
    shared_ranks(_injected_by_transformers, 2)


def _left_over() -> None:
    torch.manual_seed(0)
    wrapped = _peft_model()
    model = em.parallelize(wrapped, em.init_mesh(em.ParallelConfig(ep=2)))
    assert type(model).__name__ == "FSDPQwen3MoeForCausalLM"
    assert {name.rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}
    for use in (
        lambda: wrapped(input_ids=torch.tensor([[1, 2]])),
        lambda: wrapped.save_pretrained("nowhere"),
        lambda: em.save_adapter(wrapped, "nowhere"),
        lambda: em.clip_grad_norm_(wrapped, 1.0),
    ):
        with refused("adapter.peft-model-was-parallelized", naming="em.parallelize returned"):
            use()


def test_the_empty_peft_model_says_where_its_adapters_are() -> None:
    shared_ranks(_left_over, 2)


def _refused_late(directory: Path) -> None:
    torch.manual_seed(0)
    model = _peft_model(target_parameters=EXPERTS, init_lora_weights="gaussian")
    trained, mesh = copy.deepcopy(peft.get_peft_model_state_dict(model)), em.init_mesh(em.ParallelConfig(ep=3))
    layer = next(module for name, module in model.named_modules() if name.endswith("q_proj"))
    hook = layer.register_forward_hook(print)
    with refused("model.hooks-of-replaced-module", naming="q_proj"):
        em.parallelize(model, mesh)
    hook.remove()
    with refused("layout.ep-divides-experts"):
        em.parallelize(model, mesh)
    own = directory / str(torch.distributed.get_rank())
    model.save_pretrained(own)
    saved = load_file(own / "adapter_model.safetensors")
    assert saved.keys() == trained.keys()
    assert all(torch.equal(tensor, trained[key]) for key, tensor in saved.items())
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if ".lora_" in name
    }


def test_a_peft_model_whose_plan_is_refused_keeps_its_adapters(tmp_path: Path) -> None:
    shared_ranks(_refused_late, 3, tmp_path)


def _differing() -> None:
    base = tiny_model("qwen3_moe")
    torch.manual_seed(torch.distributed.get_rank())
    model = _peft_model(base)
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=2)))


def test_adapters_that_differ_between_ranks_are_refused() -> None:
    with refused_on_ranks("model.replicas-differ", IntegrityError, naming="lora_A"):
        shared_ranks(_differing, 2)
