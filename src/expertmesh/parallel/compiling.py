"""Compile the dense parts of each block with torch.compile: attention, norms, dense MLPs, shared experts.

This is `train.compile`. Parts are compiled in place, so names, state dict and FSDP2 groups do not change; parts of one
class share their code. Routers and routed experts stay eager: the experts that a router selects must not depend on a
compiler, and dispatch waits for counts. Linear attention, state spaces and convolutions along the sequence stay eager
too: their compiled recurrences differ from eager ones by more than rounding. A part is one graph, with the collectives
of cp and tp, or it is refused by name: nothing falls back to eager silently. Evaluation is eager.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from expertmesh.anatomy import Anatomy, carries_state, is_inside
from expertmesh.compat import allow_recompiles, compile_errors
from expertmesh.config.errors import InputError
from expertmesh.experts.lora_state import AdapterState
from expertmesh.introspection.attention import recurrent_mixers
from expertmesh.parallel.packing import running_samples, traceable
from expertmesh.state.patching import replace_forward

# Code is compiled per class, and again for other sizes, masks or dtypes. torch's own limit of 8 is for one function.
_VARIANTS = 64


def compile_parts(model: nn.Module, parts: Iterable[str], device: torch.device) -> None:
    """Make the parts of a sharded `model` (which may be on meta) compile at their first forward.

    Args:
        parts: names from `compiled_parts`, as far as this rank's pipeline stages have them.

    Raises:
        InputError: torch.compile does not work here; a function of one line is compiled to find out. A part that does
            not compile raises at its first forward.

    Collectives: every rank calls it; none is issued.
    """
    _probe(device)
    allow_recompiles(_VARIANTS)
    compiled: dict[type, Callable[..., Any]] = {}
    for name in parts:
        part: Any = model.get_submodule(name)
        kind = type(part)
        # One compiled function for a class, so that its instances share code.
        if kind not in compiled:
            compiled[kind] = torch.compile(traceable(kind.forward), fullgraph=True)
        replace_forward(part, partial(_forward, part, name, device, compiled[kind]))


def refuse_compile(adapters: AdapterState | None, frozen: str | None) -> None:
    """Raise `InputError` for settings that `train.compile` is not proven for; `frozen` is `precision.frozen`."""
    if frozen is not None:
        raise InputError(
            f"train.compile: precision.frozen is {frozen}, and weights dequantised for each use are not proven "
            "in compiled code; set precision.frozen to null or train.compile to false",
            key="train.compile-with-frozen",
        )
    if adapters is not None and adapters.dropout > 0.0:
        raise InputError(
            f"train.compile: lora.dropout is {adapters.dropout}, whose masks depend on each token's number, which "
            "compiled code would take for a constant; set lora.dropout to 0 or train.compile to false",
            key="train.compile-with-dropout",
        )


def compiled_parts(model: nn.Module, anatomy: Anatomy) -> Iterator[str]:
    """Yield the names of the parts to compile: the outermost modules in the blocks that have parameters.

    A part holds no router, no routed experts and no module that carries a state along the sequence.
    """
    eager = {spec.name for spec in anatomy.experts} | set(anatomy.routers) | set(recurrent_mixers(model, anatomy))
    # Modules beside a router that sorts rows are called with counts, which compiled code would treat as constants.
    eager |= {router.rpartition(".")[0] for router in anatomy.sorting_routers}
    # Their recurrences run in fp32 in every dtype and differ by more than rounding (Qwen3-Next: 1.2e-5; 6e-5 in fp64).
    eager |= {name for name, module in model.named_modules() if carries_state(module)}
    for block in anatomy.blocks:
        yield from _parts_of(block, model.get_submodule(block), eager)


def _parts_of(parent: str, module: nn.Module, eager: set[str]) -> Iterator[str]:
    """Yield the outermost children that hold nothing of `eager`."""
    for leaf, child in module.named_children():
        name = f"{parent}.{leaf}"
        if name in eager or not any(True for _ in child.parameters()):
            continue
        is_torchs = type(child).__module__.startswith("torch.nn.")  # one kernel, or a container
        if is_torchs or any(is_inside(inner, name) for inner in eager):
            yield from _parts_of(name, child, eager)
        else:
            yield name


def _forward(
    part: nn.Module, name: str, device: torch.device, compiled: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a part, compiled in training; the forward of its instance."""
    if not part.training:
        return type(part).forward(part, *args, **kwargs)
    try:
        return compiled(part, running_samples(device), *args, **kwargs)
    except compile_errors() as error:
        # The first line names the kind of graph break, the second one what it was.
        reason = (
            "; ".join([line.strip() for line in str(error).splitlines() if line.strip()][:2]) or type(error).__name__
        )
        raise InputError(
            f"train.compile: {name} ({type(part).__name__}) cannot be compiled as one graph: {reason}; set "
            "train.compile to false",
            key="train.compile-graph-break",
        ) from error


def _probe(device: torch.device) -> None:
    """Compile and run one line of code; raise `InputError` if no compiler works on `device`."""
    try:
        torch.compile(lambda x: x * 2, fullgraph=True)(torch.ones(2, device=device))
    except Exception as error:  # torch, a C++ compiler or Triton may raise any class; torch.compile does not work here
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).strip()
        raise InputError(
            f"train.compile: torch.compile does not work on {device.type} here: {reason}; install a C++ compiler (and "
            "Triton for an accelerator), or set train.compile to false",
            key="train.compile-unavailable",
        ) from error
