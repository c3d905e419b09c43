"""Choose the dispatcher of each layer. A library that sends rows is opened once for a model, and closed at the end."""

from collections.abc import Sequence

from torch import nn

from expertmesh.anatomy import ExpertsSpec
from expertmesh.config.errors import InputError
from expertmesh.distributed.mesh import Mesh
from expertmesh.experts.dispatch import AllToAllDispatcher, Dispatcher, LocalDispatcher
from expertmesh.experts.dispatchers import deepep
from expertmesh.experts.dispatchers.by_library import LibraryDispatcher
from expertmesh.experts.dispatchers.hierarchical import HierarchicalDispatcher
from expertmesh.state.model_view import module_state


def open_dispatchers(name: str, specs: Sequence[ExpertsSpec], mesh: Mesh, triton: bool) -> dict[str, Dispatcher]:
    """Return the dispatchers by the name of each experts module.

    Collectives: every rank calls it; none, unless a library opens its buffers.
    """
    if name == "deepep" and specs:
        library = deepep.Exchange(mesh.ep_group, max(spec.hidden_size for spec in specs))
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
    return AllToAllDispatcher(num_experts, mesh.ep_group, triton)


def close_library(model: nn.Module) -> None:
    """Free the buffers of the library that sends rows of `model`, if there is one. Every rank calls it, at the end."""
    for module in model.modules():
        layer = module_state(module).expert_layer
        if layer is not None and isinstance(layer.dispatcher, LibraryDispatcher):
            layer.dispatcher.library.close()
            return
