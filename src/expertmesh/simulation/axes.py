"""Which axis a process group's traffic belongs to: counts of the trackers beside the planner's, by axis.

Groups of equal ranks may share one process group (cp and ep, fsdp and efsdp); what goes over it is then all of theirs
that send with that kind of collective.
"""

from collections.abc import Iterable, Mapping

from expertmesh.distributed.mesh import Mesh
from expertmesh.planning.trackers import CollectiveCount
from expertmesh.planning.traffic import Transfer

# What each axis is used for. All-reduces over fsdp are of single numbers.
_KINDS = {
    "fsdp": ("all_gather", "reduce_scatter", "all_to_all"),
    "efsdp": ("all_gather", "reduce_scatter", "all_to_all", "all_reduce"),
    "replicate": ("all_reduce",),
    "ep": ("all_to_all",),
    "tp": ("all_gather", "reduce_scatter", "all_reduce"),
    "cp": ("all_to_all", "all_gather", "reduce_scatter"),
    "pp": ("send",),
}
AxisKind = tuple[str, str]


def sent_by_axis(sent: Mapping[str, Mapping[str, CollectiveCount]], mesh: Mesh) -> dict[AxisKind, CollectiveCount]:
    """Return calls and bytes by (axis or axes, kind), zero if nothing was sent.

    Left out are receives, which another rank counts as sent, and kinds that no axis is used for (single numbers).

    Args:
        sent: Counts by process group's name and kind, as `UsageTracker.sent` has them.
    """
    found: dict[AxisKind, CollectiveCount] = {}
    for group, axes in _axes(mesh).items():
        for kind in dict.fromkeys(kind for axis in _KINDS if axis in axes for kind in _KINDS[axis]):
            name = " + ".join(axis for axis in _KINDS if axis in axes and kind in _KINDS[axis])
            count = sent.get(group, {}).get(kind, CollectiveCount())
            entry = found.setdefault((name, kind), CollectiveCount())
            entry.calls += count.calls
            entry.bytes += count.bytes
    return found


def planned_by_axis(transfers: Iterable[Transfer], counted: Iterable[AxisKind]) -> dict[AxisKind, Transfer]:
    """Return the planner's transfers by the keys of `counted`, the result of `sent_by_axis`.

    A transfer over an axis without a key has its own name and kind as key.
    """
    names = list(counted)
    found: dict[AxisKind, Transfer] = {}
    for transfer in transfers:
        joint = (name for name, kind in names if kind == transfer.kind)
        key = (next((name for name in joint if transfer.axis in name.split(" + ")), transfer.axis), transfer.kind)
        found[key] = found[key].plus(transfer) if key in found else transfer
    return found


def _axes(mesh: Mesh) -> dict[str, set[str]]:
    """Return the axes of each process group by its name; groups of one rank are left out."""
    found: dict[str, set[str]] = {}
    for view in (mesh.dense, mesh.expert, mesh.dense_mesh, mesh.dense_tp_mesh):
        for axis in view.mesh_dim_names or ():
            group = view.get_group(axis)
            # Nothing is sent over the dense view's own fsdp.
            unused = axis == "fsdp" and view not in (mesh.dense_mesh, mesh.dense_tp_mesh)
            if group.size() > 1 and not unused:
                found.setdefault(str(group.group_name), set()).add(axis)
    return found
