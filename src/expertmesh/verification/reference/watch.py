"""Looks into the reference while it runs: block outputs, the experts chosen, router logits, and how near choices were.

A choice between two experts whose scores differ by rounding alone is a tie: the sharded job may take the other one and
be as right. `margin_T` is the smallest relative gap between the last score chosen and the first one left out, over
every `topk` of a block. A reference can be told to follow the job's side in ties, so that everything after a tie can
still be compared.

    T tokens of the reference's batch, K top-k, E experts
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from expertmesh.anatomy import Anatomy, ExpertsSpec
from expertmesh.verification.seen import chosen


@dataclass(slots=True)
class ReferenceWatch:
    """A `Watch` for one forward of `tokens` tokens. Everything is by name: of a block, or of an experts module.

    `forced[module]`: (flags `[T]`, choices `[T, K]`); flagged tokens take these experts.
    """

    model: PreTrainedModel
    anatomy: Anatomy
    tokens: int
    wants_router_logits: bool = False
    forced: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    choices: dict[str, Tensor] = field(default_factory=dict)
    margins: dict[str, Tensor] = field(default_factory=dict)
    router_logits: list[Tensor] = field(default_factory=list)
    _taken: list[Tensor] = field(default_factory=list)

    @contextmanager
    def during(self, unit: str, again: bool) -> Iterator[None]:
        """Note the choices and router logits of one run of `unit`."""
        specs = [spec for spec in self.anatomy.experts if spec.name.startswith(f"{unit}.")]
        hooks = []
        with ExitStack() as stack:
            for spec in specs:
                experts = self.model.get_submodule(spec.name)
                if not isinstance(experts, nn.ModuleList) and spec.call != "dense" and not again:
                    hooks.append(experts.register_forward_pre_hook(self._note_choice(spec), with_kwargs=True))
            if self.wants_router_logits:
                recorders = router_recorders(self.model)
                for name, module in self.model.get_submodule(unit).named_modules(prefix=unit):
                    hooks += [
                        module.register_forward_hook(self._note_logits(r)) for r in recorders if r.fits(name, module)
                    ]
            for spec in specs[:1]:
                stack.enter_context(_Choices(self, spec, again))
            try:
                yield
            finally:
                for hook in hooks:
                    hook.remove()

    def take(self, unit: str) -> list[Tensor]:
        taken, self._taken = self._taken, []
        return taken

    def give(self, unit: str, outputs: list[Tensor], tensors: list[Tensor]) -> None:
        if unit in self.anatomy.blocks:
            self.outputs[unit] = outputs[0].detach()
        self.router_logits += tensors

    def _note_choice(self, spec: ExpertsSpec) -> Any:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.choices[spec.name] = chosen(args, kwargs)

        return note

    def _note_logits(self, recorder: "_Recorder") -> Any:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            self._taken.append(output[recorder.index] if isinstance(output, tuple) else output)

        return note


class _Choices(TorchFunctionMode):
    """Notes how near every `topk` was, and makes flagged tokens choose what they are told."""

    def __init__(self, watch: ReferenceWatch, spec: ExpertsSpec, again: bool) -> None:
        super().__init__()
        self.watch, self.spec, self.again = watch, spec, again

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is not torch.topk and func is not torch.Tensor.topk:
            return result
        scores = args[0] if args else kwargs["input"]
        last = kwargs.get("dim", args[2] if len(args) > 2 else -1) in (-1, scores.dim() - 1)
        if not last or scores.numel() == 0:
            return result
        if not self.again:
            self._note(scores.detach(), result.values.shape[-1])
        forced = self.watch.forced.get(self.spec.name)
        is_final = scores.shape[-1] == self.spec.num_experts and scores.numel() == self.watch.tokens * scores.shape[-1]
        if forced is None or not is_final or result.indices.shape[-1] != forced[1].shape[-1]:
            return result
        flags, choices = (value.to(scores.device) for value in forced)
        own = result.indices.reshape(self.watch.tokens, -1)
        index = torch.where(flags[:, None], choices.to(own.dtype), own).view(result.indices.shape)
        return torch.return_types.topk((torch.gather(scores, -1, index), index.clone()))

    def _note(self, scores: Tensor, k: int) -> None:
        rows = scores.reshape(-1, scores.shape[-1]).float()
        if k >= rows.shape[-1] or rows.shape[0] % self.watch.tokens:
            return
        top = rows.topk(k + 1, dim=-1).values
        gap = (top[:, k - 1] - top[:, k]) / top[:, k - 1].abs().clamp_min(torch.finfo(torch.float32).tiny)
        gap_T = gap.nan_to_num(0.0).view(self.watch.tokens, -1).min(dim=1).values
        before = self.watch.margins.get(self.spec.name)
        self.watch.margins[self.spec.name] = gap_T if before is None else torch.minimum(before, gap_T)


@dataclass(frozen=True, slots=True)
class _Recorder:
    """Where transformers takes a family's router logits: `index` of the outputs of modules of a class."""

    kind: type[nn.Module]
    index: int
    layer: str | None

    def fits(self, name: str, module: nn.Module) -> bool:
        return isinstance(module, self.kind) and (self.layer is None or f".{self.layer.strip('.')}." in f".{name}.")


def router_recorders(model: PreTrainedModel) -> list[_Recorder]:
    """What the family declares under `router_logits`."""
    found: dict[_Recorder, None] = {}
    for part in model.modules():
        declared = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits")
        for one in declared if isinstance(declared, list) else [declared] if declared is not None else []:
            kind: Any = getattr(one, "target_class", one)
            found[_Recorder(kind, getattr(one, "index", 0), getattr(one, "layer_name", None))] = None
    return list(found)
