"""bf16 computed over fp32 parameters in one family: no further from the fp32 model than the unsharded bf16 model is.

The unsharded bf16 model is what `from_pretrained(dtype=bfloat16)` makes of the files, in fp32 what the family keeps so;
with adapters, stock PEFT on it. Compared are all gradients together, in the norm of their difference to those of the
fp32 model, and tensor by tensor. What the family keeps in fp32 must be fp32 whenever the module that has it runs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn

import expertmesh as em
from expertmesh.weights.meta_model import kept_in_fp32
from tests.adapters.reference import in_files, random_adapter
from tests.families.lora import adapted_names
from tests.families.proof import Gradients, Run, floor_of, forward_backward_of, rows_of, targets_of
from tests.families.tiny import EXPERTS, model_class_of, random_model
from tests.support.ranks import shared_ranks
from tests.support.reference import add_gradients, of_all_stages

MARGIN, OF_ONE = 1.5, 8.0
BF16 = em.PrecisionConfig(params="float32", compute="bfloat16", reduce="float32")
SEEDS = range(1, 6)
ROWS = 8  # rounding moves a token to another expert now and then: the more tokens, the less one decides


@dataclass(frozen=True, slots=True)
class Ratio:
    """The error of the sharded bf16 model over that of the unsharded one, of the worst tensor; `error` and `own` are
    those of all gradients together, relative to the gradients.
    """

    error: float
    own: float
    worst: float
    tensor: str

    @property
    def joint(self) -> float:
        return self.error / self.own

    def check(self) -> None:
        # Tensor by tensor they are different draws of the same rounding, and of one element one may be tiny by luck.
        assert self.joint <= MARGIN, self
        assert self.worst <= OF_ONE, self


def bf16_ratio(model_class: str, family: str, scratch: Path) -> float:
    """Of all gradients of several random models together, over ep 2: in one alone, a token whose choice of experts is
    moved by rounding may decide. Raises `AssertionError` beyond the margin.
    """
    ratios = [
        bf16_ratios(model_class, family, {"ep2": Run((2, 2, "auto"))}, scratch / str(seed), seed=seed)["ep2"]
        for seed in SEEDS
    ]
    squares = [sum(value**2 for value in values) for values in ((r.error for r in ratios), (r.own for r in ratios))]
    ratio = float((squares[0] / squares[1]) ** 0.5)
    assert ratio <= MARGIN, ratios
    return ratio


def bf16_ratios(
    model_class: str,
    family: str,
    runs: Mapping[str, Run],
    scratch: Path,
    *,
    lora: bool = False,
    tamper: Callable[[nn.Module], None] | None = None,
    seed: int = 1,
) -> dict[str, Ratio]:
    """By run. `tamper` plants a bug after load."""
    random_model(model_class, family, seed=seed).save_pretrained(scratch / "random")
    kind: Any = model_class_of(model_class, family)
    kind.from_pretrained(scratch / "random", dtype=torch.float32).save_pretrained(scratch / "source")
    exact, own = (_unsharded(kind, scratch, dtype, lora) for dtype in (torch.float32, torch.bfloat16))
    found: dict[str, Ratio] = {}
    for world in sorted({run.world for run in runs.values()}):
        here = {name: run for name, run in runs.items() if run.world == world}
        for got in shared_ranks(_rank, world, scratch, list(here.values()), lora, tamper)[:1]:
            found |= {name: _ratio(mine, own, exact) for name, mine in zip(here, got, strict=True)}
    return found


def _ratio(got: Gradients, own: Gradients, exact: Gradients) -> Ratio:
    # A tensor whose error is far below what is usual may have it smaller by luck.
    floor = floor_of({name: _less(own, exact, name) for name in exact}) * 100
    errors = {name: _less(own, exact, name).norm() + floor * g.numel() ** 0.5 for name, g in exact.items()}
    worst, tensor = max((float(_less(got, exact, name).norm() / error), name) for name, error in errors.items())
    size = _distance(exact, {})
    return Ratio(_distance(got, exact) / size, _distance(own, exact) / size, worst, tensor)


def _less(some: Gradients, others: Gradients, name: str) -> torch.Tensor:
    """What is in one of the two alone counts as zero in the other."""
    zero = torch.zeros(())
    return (some.get(name, zero) - others.get(name, zero)).double()


def _unsharded(kind: Any, scratch: Path, dtype: torch.dtype, lora: bool) -> Gradients:
    model = kind.from_pretrained(scratch / "source", dtype=dtype).train()
    model.set_experts_implementation("eager")
    if lora and dtype == torch.float32:
        modules, parameters = adapted_names(model)
        model = random_adapter(model, scratch / "adapter", modules, parameters)
    elif lora:
        model = peft.PeftModel.from_pretrained(model, str(scratch / "adapter"), is_trainable=True)
    add_gradients(model, [(row, row) for row in _rows()])
    trained = ((name.replace(".default", ""), p) for name, p in model.named_parameters() if p.requires_grad)
    return {name: p.grad.float() for name, p in trained if p.grad is not None}


def _rows() -> list[torch.Tensor]:
    return [row for step in range(ROWS // len(rows_of(0))) for row in rows_of(step)]


def _rank(
    scratch: Path, runs: Sequence[Run], lora: bool, tamper: Callable[[nn.Module], None] | None
) -> list[Gradients]:
    return [_gradients(scratch, run, lora, tamper) for run in runs]


def _gradients(scratch: Path, run: Run, lora: bool, tamper: Callable[[nn.Module], None] | None) -> Gradients:
    mesh = em.init_mesh(run.parallel, num_experts=EXPERTS)
    adapters = em.LoraConfig(from_adapter=str(scratch / "adapter")) if lora else None
    moe = run.moe(torch.bfloat16)
    model = em.load_model(scratch / "source", mesh, precision=BF16, moe=moe, lora=adapters)
    if tamper is not None:
        tamper(model)
    _watch_dtypes(model)
    rows = _rows()
    forward_backward_of(model, mesh, rows[mesh.data_rank :: mesh.layout.data_ranks], targets_of(rows))
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.dtype == torch.float32, name
    trained = of_all_stages(model, mesh, _gradient)
    return in_files(model, trained) if lora else trained


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _distance(some: Gradients, others: Gradients) -> float:
    """Of all gradients together."""
    return sum(float(_less(some, others, name).norm()) ** 2 for name in some.keys() | others.keys()) ** 0.5


def _watch_dtypes(model: Any) -> None:
    """Raise when a module runs while something that the family keeps in fp32, in it, is anything else."""
    kept = kept_in_fp32(model, torch.bfloat16)

    def check(name: str, module: nn.Module, args: Any) -> None:
        for leaf, parameter in module.named_parameters(prefix=name):
            assert not kept(leaf) or parameter.dtype == torch.float32, f"{leaf} is {parameter.dtype} when it is used"

    for name, module in model.named_modules():
        module.register_forward_pre_hook(partial(check, name))
