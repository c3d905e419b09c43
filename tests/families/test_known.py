"""The table of known answers says what is found when the questions are asked again, and is asked for nothing else."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import nn

from expertmesh.adapters.plan import adapt
from expertmesh.anatomy import describe
from expertmesh.config import LoraConfig
from expertmesh.distributed.layout import Layout
from expertmesh.introspection import attention, compute_dtype, known_families
from expertmesh.introspection.known_families import class_key, proof_key
from expertmesh.parallel import stages
from expertmesh.parallel.stages import Cut, plan_cut
from expertmesh.state.model_view import meta_copy
from expertmesh.weights.meta_model import build_meta_model, kept_in_fp32, read_model_config
from tests.families.known import answers_of, ask_compute
from tests.families.test_families import CORE, FAMILIES
from tests.support.errors import refused
from tests.support.models import tiny_config
from tests.support.rotation import of_this_commit

TABLE = known_families._table()
needs_the_table = pytest.mark.skipif(
    not TABLE, reason=f"known_families.json has no answers for transformers {transformers.__version__}"
)


def _cut(model: Any) -> Cut:
    return plan_cut(meta_copy(model), describe(model), Layout(pp=2))


def _model() -> Any:
    return build_meta_model(tiny_config("qwen3_moe"), torch.float32)


@contextmanager
def _no_proof() -> Iterator[None]:
    with mock.patch.object(stages, "probe", side_effect=AssertionError("proven on the spot")):
        yield


@needs_the_table
@pytest.mark.parametrize("family", of_this_commit(CORE, 2))
def test_what_is_asked_again_is_answered_as_in_the_table(family: str) -> None:
    asked = answers_of(FAMILIES[family], switches=0)
    assert sum(map(len, asked.values())) > 5
    for question, answers in asked.items():
        assert {key: TABLE[question][key] for key in answers} == answers


@needs_the_table
@pytest.mark.parametrize("lora", [None, LoraConfig(r=2)], ids=["full", "adapters"])
def test_a_known_family_is_neither_run_nor_read(lora: LoraConfig | None) -> None:
    model = _model()
    if lora is not None:
        adapt(model, lora, torch.float32, None)
    with _no_proof(), mock.patch.object(attention, "_tree", side_effect=AssertionError("source was read")):
        known = _cut(model)
        assert attention.registry_call(model.model.layers[0].self_attn) is not None
    with mock.patch.object(known_families, "_table", return_value={}):
        assert _cut(model) == known


@needs_the_table
@pytest.mark.parametrize("lora", [None, LoraConfig(r=2)], ids=["full", "adapters"])
@pytest.mark.parametrize("name", ["allenai--OLMoE-1B-7B-0924-Instruct", "mistralai--Mixtral-8x7B-Instruct-v0.1"])
def test_a_published_model_is_known_wherever_it_was_read_from(
    name: str, lora: LoraConfig | None, tmp_path: Path
) -> None:
    shutil.copy(Path(__file__).parents[1] / "published" / f"{name}.json", tmp_path / "config.json")
    config, _ = read_model_config(str(tmp_path))
    model = build_meta_model(config, torch.float32 if lora is None else torch.bfloat16)
    assert model.name_or_path == str(tmp_path)
    anatomy, kept = describe(model), kept_in_fp32(model, torch.bfloat16)
    if lora is not None:
        adapt(model, lora, torch.float32, None)
    with _no_proof(), mock.patch.object(compute_dtype, "_run", side_effect=AssertionError("proven on the spot")):
        _cut(model)
        ask_compute(model, anatomy, kept)


@needs_the_table
def test_another_version_or_another_setting_is_proven_on_the_spot() -> None:
    known_families._table.cache_clear()
    try:
        with (
            mock.patch.object(known_families.transformers, "__version__", "5.0.0"),
            _no_proof(),
            pytest.raises(AssertionError),
        ):
            _cut(_model())
    finally:
        known_families._table.cache_clear()
    config = tiny_config("qwen3_moe")
    config.text_of_a_new_setting = "on"
    with _no_proof(), pytest.raises(AssertionError):
        _cut(build_meta_model(config, torch.float32))


class _CarriesState(nn.Module):
    """Adds what the block before it has computed."""

    last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen, _CarriesState.last = _CarriesState.last, x
        return x if seen is None else x + seen


def test_code_that_is_not_transformers_own_is_proven_on_the_spot() -> None:
    model = _model()
    assert proof_key(model) is not None
    for layer in model.model.layers:
        layer.input_layernorm = _CarriesState()
    assert proof_key(model) is None
    with refused("layout.pp-carries-more-than-hidden-state"):
        _cut(model)


def test_a_forward_that_another_library_replaced_is_proven_on_the_spot() -> None:
    model = _model()
    attention = type(model.model.layers[0].self_attn)
    assert class_key(attention) == "transformers.models.qwen3_moe.modeling_qwen3_moe Qwen3MoeAttention"
    with mock.patch.object(attention, "forward", lambda self, *args, **kwargs: args):
        assert proof_key(model) is None
    model.model.layers[0].self_attn.forward = lambda *args, **kwargs: args
    assert proof_key(model) is None


def test_a_model_with_a_hook_is_proven_on_the_spot() -> None:
    model = _model()
    hook = model.model.layers[1].input_layernorm.register_forward_hook(lambda module, args, output: output)
    assert proof_key(model) is None
    hook.remove()
    assert proof_key(model) is not None


def test_a_parameter_that_two_blocks_share_is_refused_for_a_known_family_too() -> None:
    model = _model()
    first, second = model.model.layers[:2]
    second.mlp.gate.weight = first.mlp.gate.weight
    with refused("layout.pp-shared-parameter", naming="model.layers.1"):
        _cut(model)
