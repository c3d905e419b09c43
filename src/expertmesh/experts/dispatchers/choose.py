"""Which dispatcher each layer gets. A library that carries rows is refused by name where it cannot, opened once for a
model, and closed at the end.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.cuda import is_available as has_gpu

from expertmesh.anatomy import ExpertsSpec
from expertmesh.config.errors import InputError
from expertmesh.distributed.layout import Layout
from expertmesh.distributed.mesh import Mesh
from expertmesh.experts.dispatch import AllGatherDispatcher, AllToAllDispatcher, Dispatcher, LocalDispatcher
from expertmesh.experts.dispatchers import deepep
from expertmesh.experts.dispatchers.by_library import Library, LibraryDispatcher
from expertmesh.experts.dispatchers.hierarchical import HierarchicalDispatcher
from expertmesh.state.sharded_model import module_state

LIBRARIES: dict[str, ModuleType] = {"deepep": deepep}


def library_refusal(name: str, layout: Layout, specs: Sequence[ExpertsSpec], dtype: torch.dtype) -> str | None:
    """Why `moe.dispatch: name` cannot carry the rows of `specs` in `dtype`, or None. No communication.

    Ranks import the library; a launcher or a planner, which leaves devices alone, looks whether it is installed.
    """
    ours = LIBRARIES[name]
    refusal: str | None = ours.refusal(layout, specs, dtype)
    if refusal is not None:
        return refusal
    if not has_gpu():
        return "there is no GPU"
    if dist.is_initialized() and dist.get_backend() == "fake":
        return "its kernels cannot be simulated"
    package = ours.MODULE.partition(".")[0]
    try:
        missing = importlib.util.find_spec(package) is None or importlib.util.find_spec(ours.MODULE) is None
    except ValueError:  # a module that was put into sys.modules without a spec
        missing = False
    if missing:
        return f"{ours.MODULE} is not installed; {ours.INSTALL}"
    if not dist.is_initialized():
        return None
    try:
        module = importlib.import_module(ours.MODULE)
    except Exception as error:  # a build for another CUDA, torch or NCCL fails in many ways; what it was is printed
        return f"{ours.MODULE} cannot be imported ({type(error).__name__}: {error}); {ours.INSTALL}"
    if (lacking := _lacking(module, ours.CALLS)) is not None:
        return f"the {ours.MODULE} that is installed has no {lacking}; {ours.INSTALL}"
    return None


def _lacking(module: ModuleType, calls: dict[str, dict[str, tuple[str, ...]]]) -> str | None:
    """The first class, method or parameter that we give and `module` has not."""
    for owner, methods in calls.items():
        if (found := getattr(module, owner, None)) is None:
            return owner
        for method, parameters in methods.items():
            call: Any = getattr(found, method, None)
            if call is None:
                return f"{owner}.{method}"
            known = inspect.signature(call).parameters
            if unknown := [each for each in parameters if each not in known]:
                return f"{unknown[0]} of {owner}.{method}"
    return None


def library_bytes(name: str, layout: Layout, hidden: int) -> int:
    """What the buffers of `moe.dispatch: name` take of each device beside torch's memory, for rows of `hidden`."""
    return int(LIBRARIES[name].buffer_bytes(layout, hidden)) if name in LIBRARIES and layout.ep > 1 else 0


def open_dispatchers(name: str, specs: Sequence[ExpertsSpec], mesh: Mesh, triton: bool) -> dict[str, Dispatcher]:
    """By the name of each experts module. Every rank calls it; communicates where a library opens its buffers alone."""
    if name in LIBRARIES and specs:
        library: Library = LIBRARIES[name].Exchange(mesh.ep_group, max(spec.hidden_size for spec in specs))
        return {spec.name: LibraryDispatcher(spec.num_experts, mesh.layout.ep, library, triton) for spec in specs}
    return {spec.name: _dispatcher(name, spec.num_experts, mesh, triton) for spec in specs}


def _dispatcher(name: str, num_experts: int, mesh: Mesh, triton: bool) -> Dispatcher:
    if mesh.layout.ep == 1:
        return LocalDispatcher(num_experts, triton)
    if name == "hierarchical":
        if mesh.ep_nodes is None:
            raise InputError(
                f"moe.dispatch: hierarchical needs EP groups of whole nodes with the same number of ranks, which ep "
                f"{mesh.layout.ep} has not here; set moe.dispatch to auto",
                key="moe.dispatch-needs-nodes",
            )
        across, inside = (mesh.ep_nodes.get_group(axis) for axis in ("across", "inside"))
        return HierarchicalDispatcher(num_experts, across, inside, triton)
    if name == "all_gather":
        return AllGatherDispatcher(num_experts, mesh.ep_group)
    return AllToAllDispatcher(num_experts, mesh.ep_group, triton)


def close_library(model: nn.Module) -> None:
    """Free the buffers of the library that carries rows of `model`, if one does. Every rank calls it, at the end."""
    for module in model.modules():
        layer = module_state(module).expert_layer
        if layer is not None and isinstance(layer.dispatcher, LibraryDispatcher):
            layer.dispatcher.library.close()
            return
