"""Check the kinds and shapes of the optimizer state in a checkpoint's manifest.

For verify.py. It returns problems as sentences and never reads a tensor.
"""

import re
from collections.abc import Mapping

from expertmesh.checkpoint.schema import Manifest, TensorEntry
from expertmesh.checkpoint.state import OPTIMIZER
from expertmesh.training.optimizers.blocks import scale_shape

_SCALE, _MUON, _ADAMW = "_scale", "momentum_buffer", {"exp_avg", "exp_avg_sq"}


def optimizer_problems(manifest: Manifest) -> tuple[list[str], tuple[str, ...], tuple[str, ...]]:
    """Return the problems of the optimizer state, the kinds of state, and the trained parameters without state.

    All trained parameters need the same kinds of state, in the shape of the parameter. 8-bit codes have scales as well,
    and with Muon a parameter has either its momentum or AdamW's moments.

    Returns:
        The sentences; the kinds of state, sorted; and the names, with numbers as `*`, of which no trained parameter has
        any state. These are no problem: no step has updated such parameters.
    """
    texts, model, trained, held = [], manifest.model, set(manifest.trained), dict[str, dict[str, TensorEntry]]()
    for key, entry in manifest.optimizer.items():
        name, _, slot = key.removeprefix(OPTIMIZER).rpartition(".")
        held.setdefault(name, {})[slot] = entry
        if name not in trained:
            texts.append(f"{key}: is optimizer state of a parameter that is not trained")
    for name, slots in held.items():
        for slot, wanted in _wanted_shapes(slots, model[name].shape if name in model else None).items():
            if slot in slots and slots[slot].shape not in ([], wanted):
                texts.append(
                    f"{OPTIMIZER}{name}.{slot}: has the shape {slots[slot].shape}, not {wanted} as its parameter"
                )
    kinds = {slot for slots in held.values() for slot in slots}
    same = {slot for slot in kinds if not slot.endswith(_SCALE)}
    kin = {_pattern(name): name for name in held}
    without = dict[str, None]()
    for name in manifest.trained:
        slots = held.get(name, {})
        scales = {f"{slot}{_SCALE}" for slot, entry in slots.items() if entry.dtype == "U8"}
        needed = same - (_ADAMW if _MUON in slots else {_MUON} if same & _ADAMW else set())
        missing = sorted((needed | scales) - slots.keys())
        if model and name not in model:  # `model` is empty for a checkpoint without weights
            texts.append(f"{name}: is trained, but not in the checkpoint")
        elif name not in held and _pattern(name) not in kin:
            without[_pattern(name)] = None
        elif missing:
            texts.append(
                f"{name}: is trained, but its optimizer state {' and '.join(missing)} is not in the checkpoint"
            )
        texts += [
            f"{OPTIMIZER}{name}.{slot}: is the scale of what is not in 8 bits"
            for slot in sorted(slots.keys() - same - scales)
        ]
    return texts, tuple(sorted(kinds)), tuple(without)


def _wanted_shapes(slots: Mapping[str, TensorEntry], parameter: list[int] | None) -> dict[str, list[int]]:
    """Return the required shapes of one parameter's state: that of the parameter (if known), and those of scales."""
    wanted = {} if parameter is None else {slot: parameter for slot in slots if not slot.endswith(_SCALE)}
    for slot, entry in slots.items():
        if entry.dtype == "U8" and entry.shape:
            wanted[f"{slot}{_SCALE}"] = scale_shape(entry.shape)
    return wanted


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
