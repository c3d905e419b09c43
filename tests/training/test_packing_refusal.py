"""Packed samples are kept apart, or packing is refused, in models whose own code would let them see each other."""

from typing import Any
from unittest import mock

import pytest
import torch

from expertmesh.introspection import proofs
from expertmesh.introspection.attention import _masks_see_positions, packing_refusal
from expertmesh.parallel import packing as packed_rows
from tests.families import packing
from tests.families.packing import check_packing, packing_of
from tests.families.tiny import random_model
from tests.support.models import tiny_model
from tests.support.ranks import run_ranks

DIRECT = "create_causal_mask(config=c, position_ids=position_ids)"
UNPACKED = "kwargs = {'config': c, 'position_ids': p}\nmask = create_sliding_window_causal_mask(**kwargs)"
FORGOTTEN = "kwargs = {'config': c}\nmask = create_causal_mask(**kwargs)"


@pytest.mark.parametrize(
    ("source", "seen"),
    [(DIRECT, True), (UNPACKED, True), (FORGOTTEN, False), (f"{DIRECT}\n{FORGOTTEN}", False), ("", True)],
)
def test_every_mask_has_to_see_the_position_ids(source: str, seen: bool) -> None:
    assert _masks_see_positions(source) is seen


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_families_whose_masks_do_are_packed(family: str) -> None:
    assert packing_refusal(tiny_model(family)) is None


def test_several_position_axes_are_refused() -> None:
    model = tiny_model("qwen3_moe")
    model.get_rope_index = lambda: None
    assert "several axes" in (packing_refusal(model) or "")


GPT_OSS = ("GptOssForCausalLM", "gpt_oss")  # masks without position ids, in full and sliding attention with sinks
AFMOE = ("AfmoeForCausalLM", "afmoe")  # the same, behind a block without experts
QWEN3_5 = ("Qwen3_5MoeForCausalLM", "qwen3_5_moe")  # convolutions and states of linear attention


GLM_4_5V = ("Glm4vMoeForConditionalGeneration", "glm4v_moe")  # several position axes, and masks by the text's alone
DEEPSEEK_V4 = ("DeepseekV4ForCausalLM", "deepseek_v4")  # compresses positions: its attention runs sample by sample
GLM_5 = ("Glm5NextForConditionalGeneration", "glm5_next")  # the same for indices, which the next block reads
QWEN4 = ("Qwen4ExpForCausalLM", "qwen4_exp")
ZAYA = ("ZayaForCausalLM", "zaya")  # convolutions of queries and keys, beside a router that blocks hand on state of
INKLING = ("InklingForCausalLM", "inkling")  # convolutions in attention and behind MLPs
INKLING2 = ("Inkling2ForCausalLM", "inkling2")  # the same, and attention over the states of earlier blocks


SLOW = pytest.mark.slow(why="`make families` packs all")


@pytest.mark.parametrize(
    ("model_class", "family"),
    [
        QWEN3_5,
        *(
            pytest.param(*each, marks=SLOW)
            for each in (GPT_OSS, GLM_4_5V, DEEPSEEK_V4, GLM_5, QWEN4, ZAYA, INKLING, INKLING2)
        ),
    ],
)
def test_packed_samples_train_as_samples_apart(model_class: str, family: str) -> None:
    assert packing_of(model_class, family) is None
    as_the_family_has_it = mock.patch.object(packed_rows, "_borders", return_value=None)
    with as_the_family_has_it, pytest.raises(AssertionError, match="see each other"):
        packing_of(model_class, family, run_ranks)


def test_what_is_proven_on_the_spot_is_run_apart_as_well() -> None:
    with mock.patch.object(proofs, "_answers", return_value={}):
        assert packing_of(*ZAYA, run_ranks) is None


@pytest.mark.slow_cases(r"Inkling2.*", why="another family stays")
@pytest.mark.parametrize(("model_class", "family"), [ZAYA, INKLING2])
def test_a_border_that_is_off_by_one_is_seen(model_class: str, family: str) -> None:
    own = packed_rows._borders

    def one_later(position_BS: torch.Tensor | None) -> Any:
        borders = own(position_BS)
        if borders is None:
            return None
        (start, end), (_, last), *others = borders
        return [(start, end + 1), (end + 1, last), *others]

    lengths = mock.patch.object(packing, "_LENGTHS", (((11, 14, 14), (39,)), ((20, 19),)))
    with (
        lengths,
        mock.patch.object(packed_rows, "_borders", one_later),
        pytest.raises(AssertionError, match="see each"),
    ):
        packing_of(model_class, family, run_ranks)


ON_AXES = [
    (QWEN3_5, {"tp": 2}),
    (QWEN3_5, {"pp": 2}),
    (GLM_5, {"pp": 2}),
    (DEEPSEEK_V4, {"cp": 2}),
    (DEEPSEEK_V4, {"pp": 2}),
    (ZAYA, {"cp": 2}),
    (INKLING, {"cp": 2}),
    (INKLING2, {"cp": 2}),
    (QWEN4, {"cp": 2}),
]


@pytest.mark.parametrize(
    ("of", "axes"),
    [
        (GPT_OSS, {"cp": 2}),
        (AFMOE, {"pp": 2}),
        *(pytest.param(*each, marks=SLOW) for each in ON_AXES),
    ],
    ids=str,
)
def test_packed_samples_are_kept_apart_on_every_axis(of: tuple[str, str], axes: dict[str, int]) -> None:
    check_packing(*of, axes)


def test_attention_that_runs_by_samples_needs_masks_that_can_be_cut() -> None:
    model = random_model(*QWEN4)
    assert packing_refusal(model) is None
    model.config._attn_implementation = "flex_attention"
    assert "carries state" in (packing_refusal(model) or "")


def test_convolutions_of_a_tower_do_not_look_along_text() -> None:
    model = random_model("MuseSparkForConditionalGeneration", "muse_spark")
    assert packing_refusal(model) is None
    model.model.language_model.conv = torch.nn.Conv1d(1, 1, 1)
    assert "carries state" in (packing_refusal(model) or "")
