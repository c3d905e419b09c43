"""Record how the reference chooses experts: the margin of each token's choice. Force the job's experts if requested.

If the scores of two experts differ by rounding alone, it is a tie: the sharded job may choose the other expert and be
right as well. A token's margin is the smallest relative gap between the last chosen score and the first one that is not
chosen, over every `topk` of a block. With the job's experts forced, everything after a tie can still be compared.

    T tokens of the reference's batch, K top-k, E experts
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from expertmesh.anatomy import ExpertsSpec, is_inside


@dataclass(slots=True)
class Choices:
    """The chosen experts of a forward, and of the recomputation in its backward.

    A key `module` is the name of an experts module, or of one of `routers`.
    """

    experts: Sequence[ExpertsSpec]
    """The experts modules of the model."""
    routers: Mapping[str, nn.Module]
    """The routers that sort rows by expert themselves, by name; a block may have several."""
    tokens: int
    """The number of tokens of the batch, T."""
    forced: Mapping[str, Tensor] = field(default_factory=dict)
    """The experts to take, `[T, K]` by module; negative for tokens that choose themselves."""
    own: dict[str, Tensor] = field(default_factory=dict)
    """The experts that the tokens would have chosen, `[T, K]` by module, for modules with forced experts."""
    margins: dict[str, Tensor] = field(default_factory=dict)
    """The margin of each token, `[T]` by module."""

    def during(self, unit: str) -> AbstractContextManager[Any]:
        """Return a context for one run of `unit`, which records and forces its experts."""
        spec = next((spec for spec in self.experts if spec.name.startswith(f"{unit}.")), None)
        return nullcontext() if spec is None else self._recorded(unit, spec)

    @contextmanager
    def _recorded(self, unit: str, spec: ExpertsSpec) -> Iterator[None]:
        recorder = _TopKRecorder(self, spec)
        with ExitStack() as stack:
            for name, router in self.routers.items():
                if is_inside(name, unit):
                    stack.enter_context(router.register_forward_pre_hook(partial(recorder.enter, name)))
            stack.enter_context(recorder)
            yield


class _TopKRecorder(TorchFunctionMode):
    """Records the margin of every `topk`, and makes tokens take their forced experts."""

    def __init__(self, recorder: Choices, spec: ExpertsSpec) -> None:
        super().__init__()
        self.recorder, self.name, self.num_experts = recorder, spec.name, spec.num_experts

    def enter(self, name: str, *_: Any) -> None:
        """Assign the following `topk` to the router `name`; a forward pre-hook of it."""
        self.name = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is not torch.topk and func is not torch.Tensor.topk:
            return result
        scores, tokens = args[0] if args else kwargs["input"], self.recorder.tokens
        last = kwargs.get("dim", args[2] if len(args) > 2 else -1) in (-1, scores.dim() - 1)
        if not last or scores.numel() == 0:
            return result
        self._record_margin(scores.detach(), result.values.shape[-1])
        forced = self.recorder.forced.get(self.name)
        is_final = scores.shape[-1] == self.num_experts and scores.numel() == tokens * scores.shape[-1]
        if forced is None or not is_final or result.indices.shape[-1] != forced.shape[-1]:
            return result
        own = self.recorder.own[self.name] = result.indices.reshape(tokens, -1)
        forced = forced.to(own)
        index = torch.where(forced < 0, own, forced).view(result.indices.shape)
        return torch.return_types.topk((torch.gather(scores, -1, index), index.clone()))

    def _record_margin(self, scores: Tensor, k: int) -> None:
        tokens, margins = self.recorder.tokens, self.recorder.margins
        rows = scores.reshape(-1, scores.shape[-1]).float()
        if k >= rows.shape[-1] or rows.shape[0] % tokens:
            return
        top = rows.topk(k + 1, dim=-1).values
        gap = (top[:, k - 1] - top[:, k]) / top[:, k - 1].abs().clamp_min(torch.finfo(torch.float32).tiny)
        gap_T = gap.nan_to_num(0.0).view(tokens, -1).min(dim=1).values
        margins[self.name] = torch.minimum(margins.get(self.name, gap_T), gap_T)
