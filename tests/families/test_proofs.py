"""What is proven once in a process is proven anew for whatever could change the answer."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from resource import RUSAGE_SELF, getrusage
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from expertmesh.anatomy import describe
from expertmesh.compat import frames_in_one_chunk
from expertmesh.config import PrecisionConfig
from expertmesh.config.errors import InputError
from expertmesh.distributed.layout import Layout
from expertmesh.introspection import proofs
from expertmesh.introspection.attention import packing_refusal
from expertmesh.introspection.proofs import proof_key
from expertmesh.model import plan_model
from expertmesh.parallel import stages
from expertmesh.parallel.shard_plan import ShardOptions
from expertmesh.parallel.stages import Cut, plan_cut
from expertmesh.state.model_view import meta_copy
from expertmesh.weights.meta_model import build_meta_model
from tests.families.catalogue import families
from tests.families.tiny import tiny_config as family_config
from tests.families.tiny import turned_switches
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
    with mock.patch.object(proofs, "_answers", return_value={}) as answers:
        _cut(_model())  # its blocks are proven from here on
        assert answers.return_value
        second.mlp.gate.weight = first.mlp.gate.weight
        with refused("layout.pp-shared-parameter", naming="model.layers.1"):
            _cut(model)


FAMILIES = {family.name: family.model_class for family in families() if family.model_class is not None}

# Encoder-decoders, and what is refused before anything is proven.
REFUSED_BEFORE = ("longcat_flash", "nllb_moe", "qwen3_omni_moe", "switch_transformers")


class _NeverFound(dict[Any, Any]):
    """Answers that are found anew each time, with the keys that have had different ones."""

    def __init__(self) -> None:
        super().__init__()
        self.differing: list[str] = []

    def __contains__(self, key: object) -> bool:
        return False

    def __setitem__(self, key: Any, answer: Any) -> None:
        if self.setdefault(key, answer) != answer:
            self.differing.append(f"{key}: {self[key]}, and {answer}")


@pytest.mark.slow_cases(r"(?!(qwen3_moe|qwen3_next)$).*", why="the same for other families; two stay")
@pytest.mark.parametrize("name", FAMILIES)
def test_settings_with_one_key_have_one_answer(name: str) -> None:
    known, look_up = dict[str, _NeverFound](), proofs.look_up
    questions = mock.Mock(setdefault=lambda question, _: known.setdefault(question, _NeverFound()))
    with (
        mock.patch.object(proofs, "_answers", return_value=questions),
        # Refusals are compared as well, though they are never kept.
        mock.patch.object(proofs, "look_up", lambda question, key, find, keep=None: look_up(question, key, find)),
    ):
        turned = turned_switches(_config(name).get_text_config())
        for changes in ({}, *({key: value} for key, value in turned.items())):
            with suppress(Exception):  # a combination that the family's own code does not build
                config = _config(name)
                for key, value in changes.items():
                    setattr(config.get_text_config(), key, value)
                _ask(build_meta_model(config, torch.float32))
    assert [each for answers in known.values() for each in answers.differing] == []
    assert any(known.values()) is (name not in REFUSED_BEFORE)


def _config(name: str) -> Any:
    kind = FAMILIES[name]
    assert kind is not None
    return family_config(kind, name)


def _ask(model: Any) -> None:
    """Ask what a start asks: each axis, packing, and computing in bfloat16."""
    packing_refusal(model)
    for axes in ({"pp": 2}, {"tp": 2}, {"cp": 2}):
        with suppress(InputError):
            plan_model(model, Layout(**axes), ShardOptions(PrecisionConfig()))


def test_calls_at_no_depth_take_memory_from_the_system_and_return_it() -> None:
    with ThreadPoolExecutor(1) as thread:  # whose frames are its own
        most = [thread.submit(each, 300).result() for each in (_most_faults, frames_in_one_chunk(_most_faults))]
    assert most[0] >= 100, "this Python keeps its frames otherwise: frames_in_one_chunk can go"
    assert most[1] < 10


def _most_faults(depth: int) -> int:
    """Return the page faults of a hundred calls at that depth of the stack at which they are most."""
    if depth == 0:
        return 0
    before = getrusage(RUSAGE_SELF).ru_minflt
    for _ in range(100):
        _nested(8)
    return max(getrusage(RUSAGE_SELF).ru_minflt - before, _most_faults(depth - 1))


def _nested(calls: int) -> None:
    if calls:
        _nested(calls - 1)
