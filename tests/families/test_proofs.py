"""What is proven once in a process is proven anew for whatever could change the answer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from expertmesh.anatomy import describe
from expertmesh.distributed.layout import Layout
from expertmesh.introspection import proofs
from expertmesh.introspection.proofs import proof_key
from expertmesh.parallel import stages
from expertmesh.parallel.stages import Cut, plan_cut
from expertmesh.state.model_view import meta_copy
from expertmesh.weights.meta_model import build_meta_model
from tests.support.errors import refused
from tests.support.models import tiny_config


def _cut(model: Any) -> Cut:
    return plan_cut(meta_copy(model), describe(model), Layout(pp=2))


def _model() -> Any:
    return build_meta_model(tiny_config("qwen3_moe"), torch.float32)


@contextmanager
def _no_proof() -> Iterator[None]:
    with mock.patch.object(stages, "probe", side_effect=AssertionError("proven on the spot")):
        yield


def test_an_equal_model_is_proven_once_and_one_with_another_setting_anew() -> None:
    config = tiny_config("qwen3_moe")
    with mock.patch.object(proofs, "_answers", return_value={}):
        cut = _cut(_model())
        with _no_proof():
            assert _cut(_model()) == cut
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


def test_a_parameter_that_two_blocks_share_is_refused() -> None:
    model = _model()
    first, second = model.model.layers[:2]
    second.mlp.gate.weight = first.mlp.gate.weight
    with refused("layout.pp-shared-parameter", naming="model.layers.1"):
        _cut(model)
