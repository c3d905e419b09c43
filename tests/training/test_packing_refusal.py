"""Packing is refused for models whose own code would let packed samples see each other."""

import pytest

from expertmesh.introspection.attention import packing_refusal
from expertmesh.introspection.source_code import _masks_see_positions
from tests.support.models import tiny_model

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
