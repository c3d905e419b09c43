"""The proof of one family: sharded training is the unsharded model's, and its files come back as they were.

A tiny random model is saved by transformers' own `save_pretrained`, so in the family's published layout; the unsharded
model trains two steps in plain torch; then real gloo ranks load the directory at each layout, take the same steps on
different rows per data rank, and save. Compared are the loss, every gradient, the weights after both steps, the files'
keys and shapes, what plain `from_pretrained` reads back, and greedy generation. With pipeline stages each stage speaks
for the parameters that it holds, by the names that they have in the whole model.
"""

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

import expertmesh as em
from expertmesh.anatomy import ExpertsSpec, describe
from expertmesh.distributed.mesh import Mesh
from expertmesh.state.model_view import ModelView
from expertmesh.state.shards import is_on_other_stage
from expertmesh.verification.reference import unsharded
from tests.families.tiny import EXPERTS, VOCABULARY, model_class_of, random_model
from tests.support.ranks import LIMIT_SECONDS, run_ranks
from tests.support.reference import add_gradients, joined_stages, whole

# Both ways to multiply are on every family; fp64 has only the loop.
Layout = tuple[int, int, Literal["grouped_mm", "loop"]]  # world size, ep, compute
LAYOUTS: tuple[Layout, ...] = ((1, 1, "loop"), (2, 2, "grouped_mm"), (4, 2, "loop"), (4, 4, "grouped_mm"))
TOLERANCE = 1e-5
STEPS, ROWS, NEW_TOKENS = 2, 4, 6
# A large eps: where the true gradient is zero, AdamW would blow the rounding up to full steps.
OPTIM: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01, "eps": 1e-4}
Gradients = dict[str, torch.Tensor]  # of those parameters that have one


@dataclass(frozen=True, slots=True)
class Run:
    """One job of real ranks. `axes` are sizes of further parallel axes; `by_layer` is its order of micro-batches."""

    layout: Layout
    axes: Mapping[str, int] = field(default_factory=dict)
    by_layer: bool = False

    @property
    def world(self) -> int:
        return self.layout[0]

    @property
    def parallel(self) -> em.ParallelConfig:
        return em.ParallelConfig(ep=self.layout[1], **self.axes)

    def moe(self, dtype: torch.dtype) -> em.MoeConfig:
        return em.MoeConfig(compute="loop" if dtype == torch.float64 else self.layout[2])


@dataclass(frozen=True, slots=True)
class Expected:
    """What the unsharded model gave: a loss per step, the first step's gradients, the weights at the end.

    `floor` is the gradient norm per element, over the whole model, below which a tensor counts as zero: a key bias
    under a softmax, for one, has no gradient but the rounding of large terms that cancel.
    """

    losses: list[float]
    gradients: Gradients
    weights: dict[str, torch.Tensor]
    floor: float


@dataclass(frozen=True, slots=True)
class Errors:
    """Worst relative errors of one layout or of several; `tensor` has the worst gradient."""

    gradient: float
    tensor: str
    loss: float
    weight: float


@dataclass(frozen=True, slots=True)
class Proof:
    """How near a family comes. `exact` and `own` only where fp32 does not suffice to tell, as `prove` says."""

    fp32: Errors
    exact: Errors | None = None
    own: float | None = None


def rows_of(step: int) -> list[torch.Tensor]:
    """Token ids of different lengths for one step."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(3, VOCABULARY, (17 + 4 * row,), generator=generator) for row in range(ROWS)]


def targets_of(rows: Sequence[torch.Tensor]) -> int:
    """Tokens of `rows` that are predicted."""
    return sum(len(row) - 1 for row in rows)


class Subject:
    """One family on the bench: its files, and what the unsharded model gives, made once for each dtype in `scratch`."""

    def __init__(self, model_class: str, family: str, scratch: Path) -> None:
        self.model_class, self.family, self.scratch = model_class, family, scratch
        self._references: dict[torch.dtype, Reference] = {}

    def reference(self, dtype: torch.dtype) -> "Reference":
        if dtype not in self._references:
            self._references[dtype] = self._reference(self.scratch / str(dtype).removeprefix("torch."), dtype)
        return self._references[dtype]

    def _reference(self, directory: Path, dtype: torch.dtype) -> "Reference":
        # What from_pretrained makes of the files is the reference: at least one family resets a buffer after reading.
        random_model(self.model_class, self.family, dtype).save_pretrained(directory / "random")
        model = model_class_of(self.model_class, self.family).from_pretrained(directory / "random", dtype=dtype)
        model.save_pretrained(directory / "source")
        expected = _train_unsharded(model)
        return Reference(type(model), directory, dtype, expected, _generate(model))


@dataclass(frozen=True, slots=True)
class Reference:
    """A family in one dtype: `directory` / "source" has its files, `generated` the trained model's greedy tokens."""

    kind: type[PreTrainedModel]
    directory: Path
    dtype: torch.dtype
    expected: Expected
    generated: list[int]


def prove(subject: Subject, runs: Mapping[str, Sequence[Run]]) -> dict[str, Proof]:
    """Prove a family at each of the runs, or raise what does not hold; one proof for each of the names.

    In fp32, to `TOLERANCE`. Where a family's own arithmetic is too badly conditioned for that, fp32 cannot tell right
    from wrong: then fp64 has to agree to the same tolerance, and fp32 may differ by what two runs differ that are each
    as far from the truth as the unsharded fp32 model is (with a margin of a half).
    """
    found = measure(subject, runs, torch.float32)
    proofs = {name: Proof(errors) for name, errors in found.items()}
    unclear = [name for name, errors in found.items() if max(errors.gradient, errors.loss, errors.weight) > TOLERANCE]
    if not unclear:
        return proofs
    own = _own_error(subject.model_class, subject.family)
    for name, exact in measure(subject, {name: runs[name] for name in unclear}, torch.float64).items():
        for what in ("gradient", "loss", "weight"):
            error = getattr(exact, what)
            assert error <= TOLERANCE, f"{name}: {what} is off by {error:.1e} also in fp64 ({exact.tensor} is worst)"
        errors = found[name]
        assert errors.gradient <= 3 * own, (
            f"{name}: gradient of {errors.tensor} is off by {errors.gradient:.1e}, unsharded {own:.1e}"
        )
        proofs[name] = Proof(errors, exact, own)
    return proofs


def measure(
    subject: Subject,
    runs: Mapping[str, Sequence[Run]],
    dtype: torch.dtype,
    tamper: Callable[[nn.Module], None] | None = None,
) -> dict[str, Errors]:
    """The worst errors in `dtype` under each name; raises where files or generation differ.

    `tamper` plants a bug after load. Runs of one world size share their ranks, which take them in turn.
    """
    reference = subject.reference(dtype)
    flat = [(name, run) for name, several in runs.items() for run in several]
    found: dict[str, list[Errors]] = {name: [] for name in runs}
    for world in sorted({run.world for _, run in flat}):
        here = [(name, run) for name, run in flat if run.world == world]
        mine = [run for _, run in here]
        for (name, _), errors in zip(here, _on_ranks(reference, world, mine, tamper), strict=True):
            found[name].append(errors)
    return {name: _worst(errors) for name, errors in found.items()}


def _on_ranks(
    reference: Reference, world: int, runs: Sequence[Run], tamper: Callable[[nn.Module], None] | None
) -> list[Errors]:
    source = reference.directory / "source"
    targets = [reference.directory / f"out-{number}" for number in range(len(runs))]
    found: list[Errors] = run_ranks(_rank, world, reference, runs, targets, tamper, timeout=LIMIT_SECONDS * len(runs))[
        0
    ]
    for target, run in zip(targets, runs, strict=True):
        assert _header(target) == _header(source), f"{run}: other keys or shapes than before: {_diff(target, source)}"
        _check_read_back(reference, target, None if tamper else reference.generated)
        shutil.rmtree(target)
    return found


def _worst(found: Sequence[Errors]) -> Errors:
    gradient, tensor = max((errors.gradient, errors.tensor) for errors in found)
    return Errors(gradient, tensor, max(errors.loss for errors in found), max(errors.weight for errors in found))


def _own_error(model_class: str, family: str) -> float:
    """How far the unsharded fp32 model's gradients are from its own in fp64: the worst tensor."""
    model = random_model(model_class, family)
    exact = random_model(model_class, family, torch.float64)
    exact.load_state_dict(model.state_dict())
    fp32, fp64 = _train_unsharded(model), _train_unsharded(exact)
    return _worst_gradient(fp32.gradients, fp64)[0]


class _StaysDouble(TorchFunctionMode):
    """What a family's code casts to fp32 stays fp64 where it was: else fp64 would tell no more than fp32 does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.backward, torch.autograd.backward):
            with self:  # a mode is off inside of what it handles, and blocks are run again there
                return _run_backward(args[0], (kwargs or {}).get("grad_tensors"))
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*args, **kwargs or {})


def _run_backward(
    tensors: torch.Tensor | Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None] | None
) -> None:
    """`torch.autograd.backward`, which would hand the call to the mode once more."""
    tensors = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
    given = zip(tensors, gradients or [None] * len(tensors), strict=True)
    ones = tuple(torch.ones_like(tensor) if gradient is None else gradient for tensor, gradient in given)
    engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    engine.run_backward(tensors, ones, False, False, (), True, True)


def computing_in(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """While a model of `dtype` trains: in fp64 all of it is computed in fp64."""
    return _StaysDouble() if dtype == torch.float64 else nullcontext()


def _train_unsharded(model: PreTrainedModel) -> Expected:
    model.set_experts_implementation("eager")
    model.train()
    counts: dict[str, torch.Tensor] = {}
    hooks = [_count_choices(model, spec, counts) for spec in describe(model).experts]

    def backward(rows: Sequence[torch.Tensor]) -> float:
        with computing_in(model.dtype):
            loss = add_gradients(model, [(row, row) for row in rows])
        for hook in hooks:
            hook.remove()  # the first step's choices are counted
        return loss

    trained = dict(model.named_parameters())
    run = unsharded.train(trained, torch.optim.AdamW(trained.values(), **OPTIM), map(rows_of, range(STEPS)), backward)
    assert counts
    for name, count_E in counts.items():
        assert int((count_E[:EXPERTS] > 0).sum()) * 2 >= EXPERTS, f"{name}: routing is degenerate, {count_E.tolist()}"
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return Expected(run.losses, run.gradients, weights, floor_of(run.gradients))


def floor_of(gradients: Gradients) -> float:
    """A thousandth of the root mean square of all elements."""
    numbers = sum(gradient.numel() for gradient in gradients.values())
    return 1e-3 * math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()) / numbers)


def _count_choices(model: nn.Module, spec: ExpertsSpec, counts: dict[str, torch.Tensor]) -> Any:
    if spec.router is not None:
        router = model.get_submodule(f"{spec.name}.{spec.router}")
        return router.register_forward_hook(
            lambda module, args, out: counts.update({spec.name: counts.get(spec.name, 0) + torch.tensor(out[3])})
        )
    experts = model.get_submodule(spec.name)
    return experts.register_forward_pre_hook(_counter(counts, spec), with_kwargs=True)


def _counter(counts: dict[str, torch.Tensor], spec: ExpertsSpec) -> Any:
    def count(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if spec.call == "dense":
            seen = args[0].view(EXPERTS, -1, spec.hidden_size).any(-1).sum(1)
        else:
            index = next(value for value in (*args, *kwargs.values()) if not value.is_floating_point())
            seen = torch.bincount(index.reshape(-1).long(), minlength=2 * EXPERTS)
        counts[spec.name] = counts.get(spec.name, 0) + seen

    return count


def _rank(
    reference: Reference, runs: Sequence[Run], targets: Sequence[Path], tamper: Callable[[nn.Module], None] | None
) -> list[Errors]:
    """One rank's work; every rank returns the same."""
    found = []
    for run, target in zip(runs, targets, strict=True):
        try:
            found.append(_train(reference, run, target, tamper))
        except Exception as error:
            error.add_note(f"in {run}")
            raise
    return found


def _train(reference: Reference, run: Run, target: Path, tamper: Callable[[nn.Module], None] | None) -> Errors:
    expected, dtype = reference.expected, reference.dtype
    mesh = em.init_mesh(run.parallel, num_experts=EXPERTS)
    name: Any = str(dtype).removeprefix("torch.")
    precision = em.PrecisionConfig(params=name, compute=name, reduce=name)
    model = em.load_model(reference.directory / "source", mesh, precision=precision, moe=run.moe(dtype))
    if tamper is not None:
        tamper(model)
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIM)
    loss_error = 0.0
    gradients: Gradients = {}
    for step in range(STEPS):
        rows = rows_of(step)
        with computing_in(dtype):
            mine = rows[mesh.data_rank :: mesh.layout.data_ranks]
            total = forward_backward_of(model, mesh, mine, targets_of(rows), run.by_layer)
        dist.all_reduce(total)
        loss_error = max(loss_error, abs(float(total) / expected.losses[step] - 1))
        if step == 0:
            own = whole({n: p.grad for n, p in ModelView(model).parameters.items() if p.grad is not None})
            gradients = _of_all_stages(own, mesh)
        optimizer.step()
        optimizer.zero_grad()
    state = {name: value for name, value in ModelView(model).state.items() if not is_on_other_stage(value)}
    weights = _of_all_stages(whole(state), mesh)
    assert weights.keys() == expected.weights.keys()
    gradient, tensor = _worst_gradient(gradients, expected)
    weight = max(error_of(weights[name], value, 1e-8) for name, value in expected.weights.items())
    em.save_model(model, target, dtype=None)
    if dist.get_rank() == 0:
        torch.save(weights, target.with_suffix(".pt"))
    return Errors(gradient, tensor, loss_error, weight)


def forward_backward_of(
    model: nn.Module, mesh: Mesh, rows: Sequence[torch.Tensor], targets: int, by_layer: bool = False
) -> torch.Tensor:
    """A step's gradients from rows of this rank, one to a micro-batch; its share of the loss."""
    batches = [
        {"input_ids": row[None], "labels": row[None], "attention_mask": torch.ones_like(row)[None]} for row in rows
    ]
    if mesh.layout.pp > 1 or by_layer:
        order: Any = {"accumulate": "by_layer"} if by_layer else {}
        return em.forward_backward(model, batches, target_tokens=targets, chunk_tokens=16, **order).loss
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        loss = em.causal_lm_loss(model, batch, target_tokens=targets, chunk_tokens=16)
        loss.backward()
        total += loss.detach()
    return total


def _of_all_stages(own: Gradients, mesh: Mesh) -> Gradients:
    return joined_stages(own, mesh) if mesh.layout.pp > 1 else own


def _worst_gradient(gradients: Gradients, expected: Expected) -> tuple[float, str]:
    assert gradients.keys() <= expected.weights.keys()
    errors = [(0.0, "")]
    for name in gradients.keys() | expected.gradients.keys():
        gradient, reference = gradients.get(name), expected.gradients.get(name)
        if gradient is not None and reference is not None:
            errors.append((error_of(gradient, reference, expected.floor), name))
        elif reference is not None or (gradient is not None and gradient.any()):
            errors.append((math.inf, name))  # one of the two has a gradient where the other has none
    return max(errors)


def error_of(value: torch.Tensor, reference: torch.Tensor, floor: float) -> float:
    """Norm of the difference over the reference's norm, which counts as at least `floor` per element (rms)."""
    difference = (value.double() - reference.double()).norm()
    return float(difference / max(float(reference.double().norm()), floor * math.sqrt(reference.numel())))


def _check_read_back(reference: Reference, directory: Path, generated: list[int] | None) -> None:
    """Plain transformers reads what was saved: nothing missing or left over, the trained values, the same words."""
    kind = reference.kind
    model, info = kind.from_pretrained(directory, dtype=reference.dtype, output_loading_info=True)
    wrong = {key: value for key, value in info.items() if value}
    assert not wrong, f"from_pretrained reports {wrong}"
    weights = torch.load(directory.with_suffix(".pt"), weights_only=True)
    state = model.state_dict()
    assert state.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(state[name], value), f"{name} is not what was trained"
    assert generated is None or _generate(model) == generated, (
        "the saved model generates other tokens than the unsharded one"
    )


def _generate(model: PreTrainedModel) -> list[int]:
    model.set_experts_implementation("eager")
    model.eval()
    prompt = rows_of(0)[0][None, :8]
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    tokens: list[int] = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0].tolist()
    return tokens


def _header(directory: Path) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            shapes |= {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    return shapes


def _diff(first: Path, second: Path) -> str:
    one, two = _header(first), _header(second)
    return json.dumps({"ours": sorted(one.items() - two.items())[:5], "theirs": sorted(two.items() - one.items())[:5]})
