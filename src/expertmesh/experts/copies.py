"""Hold copies of other ranks' experts beside a rank's own, so that ranks share their tokens (`moe.replicas`).

The experts are frozen: their weights are fetched once from the ranks that own them, and nothing has to be kept equal.
Adapters on them train. So each forward exchanges those of copied experts, and its backward sends the gradients of the
copies to the owners, where they add up. Files, checkpoints and hashes know own experts alone.

    E experts, L own ones of a rank, C copies beside them, S = L + C slots, X experts that this rank sends,
    F numbers of an expert, T tokens, K top-k, M most ranks that hold an expert
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from expertmesh.distributed.collectives import all_to_all
from expertmesh.experts.mlp_spec import Adapter
from expertmesh.experts.pairs import Segments, segment_sum, segments_of
from expertmesh.experts.placement import Copied, slots_from
from expertmesh.io.boxes import inverse
from expertmesh.state.packed import PackedTensor, stored
from expertmesh.state.shards import local_tensor, placed_like


@dataclass(eq=False)
class Copies:
    """The copies on a rank of an EP group, for one layer, and the experts that it sends to copies elsewhere."""

    group: dist.ProcessGroup
    own_X: torch.Tensor
    """The own experts that are sent, by the rank that gets them, int64."""
    by_owner: Segments
    """The places of each own expert in `own_X`, to sum the gradients that come back."""
    send: list[int]
    """The number of them that each rank gets."""
    receive: list[int]
    """The number that each rank sends to this one; its copies have the order of their owners."""
    slot_EM: torch.Tensor
    """The slots that this rank's tokens go to by turns, int64."""
    turns_E: torch.Tensor
    """The number of these slots, int64."""
    storages: dict[str, torch.Tensor] = field(default_factory=dict)
    """Frozen weights `[S, ...]` by the parameter's name in the experts module, which is a view of the first L."""

    @classmethod
    def of(
        cls,
        order: Sequence[int],
        copies: Copied,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> "Copies":
        """Make the copies of this rank, whose weights `fetch` gets.

        Args:
            group: The EP group.
            device: The device of the indices.
            order: The expert in each slot of own experts, by EP rank.
            copies: The experts that each EP rank copies, in the order of their slots.
        """
        rank, held, slots = group.rank(), len(order) // group.size(), inverse(order)
        sent = [[slots[e] - rank * held for e in experts if slots[e] // held == rank] for experts in copies]
        owners = [slots[expert] // held for expert in copies[rank]]
        ways = slots_from(rank, order, copies)
        most = max(map(len, ways))
        own_X = torch.tensor([expert for experts in sent for expert in experts], dtype=torch.int64, device=device)
        return cls(
            group,
            own_X,
            segments_of(own_X, held),
            [len(experts) for experts in sent],
            [owners.count(owner) for owner in range(group.size())],
            torch.tensor([[*each, *[0] * (most - len(each))] for each in ways], device=device),
            torch.tensor([len(each) for each in ways], device=device),
        )

    def slots(self, index_TK: torch.Tensor) -> torch.Tensor:
        """Return the slot, of all EP ranks', that each token goes to for each of its experts."""
        token_T1 = torch.arange(len(index_TK), device=index_TK.device).unsqueeze(1)
        return self.slot_EM[index_TK, token_T1 % self.turns_E[index_TK]]

    def fetch(self, experts: nn.Module, names: Sequence[str]) -> None:
        """Copy the frozen parameters `names` from their owners. Replaces them by views of one storage with the copies.

        Collectives: every rank of the group calls it; one all-to-all for each name.
        """
        for name in names:
            parameter: Any = experts.get_parameter(name)
            own = local_tensor(parameter)
            copied, _ = all_to_all(stored(own)[self.own_X], self.send, self.receive, self.group)
            whole = torch.cat([stored(own), copied])
            storage = PackedTensor(whole, own.kind, own.dtype) if isinstance(own, PackedTensor) else whole
            self.storages[name] = storage
            view = DTensor.from_local(storage[: len(own)], parameter.device_mesh, parameter.placements, run_check=False)
            place, _, leaf = name.rpartition(".")
            placed = placed_like(nn.Parameter(view, requires_grad=False), parameter)
            setattr(experts.get_submodule(place), leaf, placed)

    def with_adapters(self, *own: Adapter | None) -> list[Adapter | None]:
        """Return adapters `[S, ...]` of own ones `[L, ...]`, differentiable.

        Collectives: every rank of the group calls it; one all-to-all in forward, one in backward.
        """
        tensors = [tensor for adapter in own if adapter is not None for tensor in (adapter.a_LrK, adapter.b_LNr)]
        copied = iter(self.exchanged(tensors))

        def joined(adapter: Adapter | None) -> Adapter | None:
            if adapter is None:
                return None
            a, b = (torch.cat([tensor, next(copied)]) for tensor in (adapter.a_LrK, adapter.b_LNr))
            return Adapter(a, b, adapter.scaling)

        return [joined(adapter) for adapter in own]

    def exchanged(self, own: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the values `[C, ...]` of copies of each tensor of `own`, `[L, ...]`, differentiable."""
        # Every rank of the group comes here, with tokens or without: two collectives in each forward and its backward.
        copied: Sequence[torch.Tensor] = _Exchanged.apply(self, *own)
        return copied


class _Exchanged(torch.autograd.Function):
    """Send the values of own experts to their copies, and the gradients of copies back to be summed."""

    @staticmethod
    def forward(ctx: Any, copies: Copies, *own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.copies, ctx.shapes = copies, [tensor.shape for tensor in own]
        sent_XF = torch.cat([tensor[copies.own_X].flatten(1) for tensor in own], dim=1)
        copied_CF, _ = all_to_all(sent_XF, copies.send, copies.receive, copies.group)
        parts = copied_CF.split([shape[1:].numel() for shape in ctx.shapes], dim=1)
        return tuple(part.reshape(-1, *shape[1:]) for part, shape in zip(parts, ctx.shapes, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        copies = ctx.copies
        grad_CF = torch.cat([grad.flatten(1) for grad in grads], dim=1)
        grad_XF, _ = all_to_all(grad_CF, copies.receive, copies.send, copies.group)
        parts = grad_XF.split([shape[1:].numel() for shape in ctx.shapes], dim=1)
        # Not by `index_add_`, which adds in any order on a GPU.
        summed = (segment_sum(part, copies.by_owner).view(shape) for part, shape in zip(parts, ctx.shapes, strict=True))
        return None, *summed
