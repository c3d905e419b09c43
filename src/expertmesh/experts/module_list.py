"""Run experts that are an `nn.ModuleList` of MLPs, in blocks that loop over them: older layouts, models with own code.

One module with 3-D parameters, over which the block can still loop, replaces the list; the block's code stays. Only
after the block has called its experts is it known which rows each gets, and all ranks have to exchange tokens at once.
So the block runs twice: the first run records the input of each expert and returns zeros; then one call computes all
rows where their experts are; the second run gets the results. The block itself applies the routing weights, so a token
is sent once for each of its experts. A small copy of each kind of block proves, before any weight is read, that this is
the block's own result, with its gradients (weights/module_list.py).

    E experts, H hidden, I intermediate, P rows given to experts
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from expertmesh.anatomy.expert_module import ExpertModuleSpec
from expertmesh.compat import assert_async, default_apply_gate
from expertmesh.experts.layer import layer_of
from expertmesh.state.patching import exchanged, replace_forward


@dataclass(slots=True)
class _ExpertCalls:
    """One run of a block."""

    experts: list[int] = field(default_factory=list)
    """Numbers of the experts called, in order."""
    rows: list[torch.Tensor] = field(default_factory=list)
    """Their inputs."""
    answers: list[torch.Tensor] | None = None
    """Their results, in the second run."""


class FusedExperts(nn.Module):
    """A list of MLPs in 3-D parameters, with the attributes of transformers' experts interface.

    `ups` and `down`: names of the members' linears, for the files. Called as `experts(hidden_PH, index_P1, weight_P1)`
    by `run_twice`, and looped over by the block that it belongs to.
    """

    has_post_expert_norm = False
    is_transposed = False
    is_concatenated = True
    _apply_gate = default_apply_gate

    def __init__(self, config: PreTrainedConfig, members: nn.ModuleList, spec: ExpertModuleSpec) -> None:
        super().__init__()
        self.config, self.num_experts = config, len(members)
        self.ups, self.down = spec.ups, spec.down
        self.has_gate, self.has_bias = len(spec.ups) == 2, spec.biased
        self.act_fn = nn.SiLU() if spec.silu_gated else spec.between
        if self.has_gate and not spec.silu_gated:
            setattr(self, "_apply_gate", spec.between.forward)  # noqa: B010
        up = "gate_up_proj" if self.has_gate else "up_proj"
        for leaf, end in (("weight", ""), ("bias", "_bias"))[: 1 + spec.biased]:
            setattr(self, f"{up}{end}", _stacked(members, spec.ups, leaf))
            setattr(self, f"down_proj{end}", _stacked(members, (spec.down,), leaf))
        self._run: _ExpertCalls | None = None

    def __len__(self) -> int:
        return self.num_experts

    def __getitem__(self, index: Any) -> Any:
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"expert {number} of {len(self)}")
        return partial(self._call, number % len(self))

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute the experts. Padding counts too, since the token of a row is not known here (balance.py refuses to
        steer by it).

        Collectives: those of the dispatcher over the EP group.
        """
        return layer_of(self).forward_counted(self, hidden_states, top_k_index, top_k_weights, None)

    def _call(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        """Compute one expert on `[..., H]` for the block."""
        run = self._run
        assert run is not None, "an expert of a fused list was called outside of its block"
        number = len(run.rows)
        run.experts.append(expert)
        run.rows.append(rows)
        return rows.new_zeros(rows.shape) if run.answers is None else run.answers[number].view(rows.shape)


def _stacked(members: nn.ModuleList, linears: tuple[str, ...], leaf: str) -> nn.Parameter:
    """Return `[E, ...]`: the named linears of each member, one below the other."""
    names = [f"{linear}.{leaf}" for linear in linears]
    with torch.no_grad():
        stacked = torch.stack([torch.cat([member.get_parameter(name) for name in names]) for member in members])
    return nn.Parameter(stacked, requires_grad=members[0].get_parameter(names[0]).requires_grad)


def fuse(block: nn.Module, config: PreTrainedConfig, spec: ExpertModuleSpec) -> None:
    """Replace the list `block.experts` by one `FusedExperts`, and run the block twice from now on."""
    members = block.experts
    assert isinstance(members, nn.ModuleList)
    block.experts = FusedExperts(config, members, spec)
    replace_forward(block, partial(run_twice, block))


def run_twice(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a block whose experts are fused. Collectives: one dispatch and one combine over the EP group."""
    experts, own_forward = block.experts, partial(type(block).forward, block)
    assert isinstance(experts, FusedExperts)
    first = _ExpertCalls()
    with exchanged(vars(experts), {"_run": first}):
        own_forward(*args, **kwargs)
    assert first.rows, f"{type(block).__name__} called none of its experts"
    rows_PH = torch.cat([rows.reshape(-1, rows.shape[-1]) for rows in first.rows])
    counts = [rows.numel() // rows.shape[-1] for rows in first.rows]
    expert_P = torch.tensor(first.experts).repeat_interleave(torch.tensor(counts)).to(rows_PH.device)
    out_PH = experts(rows_PH, expert_P.unsqueeze(1), rows_PH.new_ones(len(rows_PH), 1))
    second = _ExpertCalls(answers=list(out_PH.split(counts)))
    with exchanged(vars(experts), {"_run": second}):
        result = own_forward(*args, **kwargs)
    _check_same(block, first, second)
    return result


def _check_same(block: nn.Module, first: _ExpertCalls, second: _ExpertCalls) -> None:
    """Check that the second run asks what was answered; on an accelerator values are checked without waiting."""
    same = first.experts == second.experts and all(
        a.shape == b.shape for a, b in zip(first.rows, second.rows, strict=True)
    )
    reason = f"{type(block).__name__} gave its experts other tokens when it was run again"
    assert same, reason
    pairs = zip(first.rows, second.rows, strict=True)
    equal = [((a.detach() == b.detach()) | a.detach().isnan()).all() for a, b in pairs]
    assert_async(torch.stack(equal).all(), reason)
