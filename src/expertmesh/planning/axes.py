"""Which axis a process group's traffic belongs to: for counts of the census, beside the planner's by axis.

Groups of equal ranks may share one process group (cp and ep, fsdp and efsdp); what goes over it is then all of theirs
that send with that kind of collective.
"""

from collections.abc import Iterable, Mapping

from expertmesh.distributed.mesh import Mesh
from expertmesh.planning.trackers import Sent
from expertmesh.planning.traffic import Transfer

# What each axis is used for. All-reduces over fsdp are of single numbers.
_KINDS = {
    "fsdp": ("all_gather", "reduce_scatter"),
    "efsdp": ("all_gather", "reduce_scatter"),
    "replicate": ("all_reduce",),
    "ep": ("all_to_all",),
    "tp": ("all_gather", "reduce_scatter", "all_reduce"),
    "cp": ("all_to_all",),
    "pp": ("send",),
}
Key = tuple[str, str]


def sent_by_axis(sent: Mapping[str, Mapping[str, Sent]], mesh: Mesh) -> dict[Key, Sent]:
    """Calls and bytes by (axis or axes, kind), zero where nothing was sent. Left out: what is received, which another
    rank has sent, and what no axis is used for (single numbers).
    """
    axes = _axes(mesh)
    kinds = {kind for used in _KINDS.values() for kind in used}
    found = {(name, kind): Sent() for group in axes for kind in kinds if (name := _axis(axes, group, kind))}
    for group, counted in sent.items():
        for kind, entry in counted.items():
            if (axis := _axis(axes, group, kind)) is not None:
                found[axis, kind].calls += entry.calls
                found[axis, kind].bytes += entry.bytes
    return found


def planned_by_axis(transfers: Iterable[Transfer], counted: Iterable[Key]) -> dict[Key, Transfer]:
    """The planner's, under the same keys as `counted`, what `sent_by_axis` has found."""
    names = list(counted)
    found: dict[Key, Transfer] = {}
    for transfer in transfers:
        joint = (name for name, kind in names if kind == transfer.kind)
        axis = next((name for name in joint if transfer.axis in name.split(" + ")), transfer.axis)
        before = found.get((axis, transfer.kind))
        found[axis, transfer.kind] = transfer if before is None else before.plus(transfer)
    return found


def _axes(mesh: Mesh) -> dict[str, set[str]]:
    """The axes that a process group, by its name, is of; groups of one rank left out."""
    found: dict[str, set[str]] = {}
    for view in (mesh.dense, mesh.expert, mesh.dense_mesh, mesh.dense_tp_mesh):
        for axis in view.mesh_dim_names or ():
            group = view.get_group(axis)
            # Alone in the dense view it is used for nothing.
            unused = axis == "fsdp" and view not in (mesh.dense_mesh, mesh.dense_tp_mesh)
            if group.size() > 1 and not unused:
                found.setdefault(str(group.group_name), set()).add(axis)
    return found


def _axis(axes: dict[str, set[str]], group: str, kind: str) -> str | None:
    """The axis; several where one group of ranks serves them all."""
    return " + ".join(axis for axis in _KINDS if axis in axes.get(group, ()) and kind in _KINDS[axis]) or None
