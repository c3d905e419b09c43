"""Run a verification, from a configuration to its report: go through the layers in order and print the results.

Every rank calls it, under torchrun or our launcher, before the process group exists, as for training. It never changes
a run: it writes only the JSON report and a temporary directory beside `output_dir`, which it removes.

Layer 7, `--self-test`, plants known bugs in the job, one at a time, and checks that the right layer fails. The
reference is never changed. A bug that is impossible in the run (one rank, no moments) is reported as not planted. Some
trainer shipped each bug, or one of which it is a minimal variant: the loss stays plausible and the result is wrong.
"""

import gc
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from expertmesh.adapters.peft_format import WEIGHTS_FILE
from expertmesh.config import Config, LoraConfig
from expertmesh.config.errors import InputError, IntegrityError
from expertmesh.distributed.all_ranks import from_rank_0, gather_objects, raise_on_all_ranks
from expertmesh.distributed.mesh import current_device, start_process_group
from expertmesh.experts.layer import ExpertLayer, layer_of
from expertmesh.io.directory import io_errors
from expertmesh.io.terminal import plural
from expertmesh.parallel.pipeline import layers_of
from expertmesh.state.model_view import as_stored, sharded, stage_names
from expertmesh.state.shards import cut_local, local_tensor
from expertmesh.step.pipeline_schedule import schedule_kind
from expertmesh.training.control import Control
from expertmesh.training.reporting.start import versions
from expertmesh.verification.job import ProvenJob
from expertmesh.verification.layers import CHECKS
from expertmesh.verification.layers.artifacts import check_artifacts
from expertmesh.verification.layers.metamorphic import check_resume
from expertmesh.verification.layers.update import NOT_BY_ELEMENT
from expertmesh.verification.options import VerifyOptions
from expertmesh.verification.proof import Hooks, Proof, label
from expertmesh.verification.result import (
    Check,
    Layer,
    Mutation,
    Report,
    head_lines,
    layer_lines,
    mutation_lines,
    say,
    write_proof,
)
from expertmesh.verification.setup import Setup, in_float32, set_up
from expertmesh.weights.audit import expert_tensors

REPORT_FILE = "verification.json"
_SHOWN = 20


def verify(config: Config, control: Control | None = None) -> Report:
    """Verify the job of `config` on the ranks of the process group; `control.arguments` are `VerifyOptions` as JSON.

    Rank 0 prints the results and writes the report.

    Raises:
        InputError: On all ranks, if the configuration cannot run, or a file or directory cannot be written.
        IntegrityError: On all ranks, if a check failed.

    Collectives: every rank calls it, with the same configuration. It starts the process group.
    """
    control = control or Control()
    options = VerifyOptions.load(control.arguments)
    started = time.monotonic()
    start_process_group(current_device(), config.distributed.first_step_timeout_seconds)
    control.progress.at(0, "reading the data")
    with raise_on_all_ranks("preparing the verification"):
        setup = set_up(config, options, dist.get_world_size())
    torch.manual_seed(config.train.seed + dist.get_rank())
    report = Report(_facts(setup, options))
    say(head_lines(report.facts))
    with ExitStack() as stack:
        scratch = stack.enter_context(_scratch(config, options))
        # A built job is part of reference cycles, so it has to be collected before the next one is built. Freezing the
        # million objects that exist already, most of them from imports, keeps these collections short.
        gc.freeze()
        stack.callback(gc.unfreeze)
        proof = Proof(setup, scratch)
        for name in CHECKS:
            if name in options.only:
                control.progress.at(0, f"verifying: {name}")
                began = time.monotonic()
                layer = Layer(name, CHECKS[name](proof), round(time.monotonic() - began, 3))
                report.layers.append(layer)
                say(layer_lines(layer))
        if options.self_test:
            control.progress.at(0, "verifying: self-test")
            proof.free_jobs()
            report.mutations = self_test(proof)
            say(mutation_lines(report.mutations))
    report.seconds = round(time.monotonic() - started, 3)
    _finish(report, config, options)
    return report


def _finish(report: Report, config: Config, options: VerifyOptions) -> None:
    # Rank 0 decides, so that all ranks raise the same error.
    failures = from_rank_0([line[:500] for line in report.failures[:_SHOWN]])
    path = options.report or (None if options.random_data else str(Path(config.output_dir) / REPORT_FILE))
    with raise_on_all_ranks("writing the report"):
        if path is not None and dist.get_rank() == 0:
            write_proof(report, Path(path))
    where = f"; {path}" if path is not None else ""
    if failures:
        count = len(report.failures)
        raise IntegrityError(
            "\n".join([f"not verified: {plural(count, 'check')} failed{where}", *failures]), key="verify.failed"
        )
    checks = [check for layer in report.layers for check in layer.checks]
    done = sum(check.status == "pass" for check in checks)
    left = sum(check.status == "not run" for check in checks)
    caught = [mutation for mutation in report.mutations if mutation.status == "pass"]
    planted = [mutation for mutation in report.mutations if mutation.status != "not run"]
    tested = f", {len(caught)} of {len(planted)} planted bugs caught" if report.mutations else ""
    say([f"verified    {plural(done, 'check')} passed, {left} not run{tested} ({report.seconds:.0f} s){where}"])


def _facts(setup: Setup, options: VerifyOptions) -> dict[str, Any]:
    config, layout = setup.config, setup.layout
    first, schedule = setup.steps[0], None
    if layout.pp > 1 or setup.order.by_layer:
        count = len(first.batches(layout, dist.get_rank()).micro_batches)
        schedule = (
            "by layer" if setup.order.by_layer else schedule_kind(layout, count).__name__.removeprefix("Schedule")
        )
        schedule += f" over {count} micro-batch{'es' if count > 1 else ''}"
    return {
        "model": config.model.name_or_path,
        "model_type": setup.model_config.model_type,
        "layers": setup.layers[0],
        "layers_of_the_model": setup.layers[1],
        "layout": {axis: layout.size(axis) for axis in ("pp", "replicate", "fsdp", "cp", "tp", "ep", "efsdp")},
        "schedule": schedule,
        "ranks": layout.world_size,
        "device": current_device().type,
        "precision": label(config.precision),
        "lora": config.lora is not None,
        "steps": len(setup.steps),
        "samples_of_a_step": len(first.dataset),
        "tokens_of_a_step": first.dataset.tokens,
        "targets_of_a_step": first.targets,
        "packing": config.data.packing,
        "objective": config.objective.name,
        "only": list(options.only),
        "notes": list(setup.notes),
        "versions": versions(),
    }


@contextmanager
def _scratch(config: Config, options: VerifyOptions) -> Iterator[Path]:
    """Make a directory that all ranks can read, and remove it after the block.

    Raises:
        InputError: On all ranks, if rank 0 cannot make it.

    Collectives: every rank enters it; one broadcast and one small all-reduce on the default group.
    """
    made = ""
    with raise_on_all_ranks("making a directory for what is saved"):
        if dist.get_rank() == 0:
            with io_errors(beside := options.scratch_beside(config), 0):
                made = tempfile.mkdtemp(prefix=options.scratch_prefix, dir=beside)
    directory = Path(from_rank_0(made))
    try:
        yield directory
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(directory, ignore_errors=True)


Checks = Mapping[str, Callable[[Proof], list[Check]]]


@dataclass(frozen=True, slots=True)
class Bug:
    """One bug and the way to plant it in a job."""

    name: str
    """The description of the bug in the report."""
    expected: str
    """The layer that has to catch it."""
    hooks: Hooks
    checks: Checks = field(default_factory=lambda: {name: CHECKS[name] for name in ("bytes", "forward", "backward")})
    """The checks to run on the job with the bug, by layer."""
    refusal: str | None = None
    """The reason why it cannot be planted in this run, or None."""


def bugs(proof: Proof) -> list[Bug]:
    """Return all bugs but the adapter's, which needs a job with adapters. The bug between stages needs pp > 1."""
    setup, layout = proof.setup, proof.setup.layout
    alone = "needs two data ranks" if layout.data_ranks == 1 else None
    routers = alone
    if not setup.anatomy.routers:
        routers = routers or "no router is recognised"
    elif setup.config.lora is not None or setup.config.moe.router == "frozen":
        routers = routers or "routers are not trained"
    shards = "needs two ranks that share a model" if layout.world_size == layout.replicate else None
    optimizer = setup.config.optim.name
    moments = "sgd keeps no moments" if optimizer == "sgd" else None
    stale = moments or NOT_BY_ELEMENT.get(optimizer)  # the trajectory alone is too coarse to tell
    update, resume = {"update": CHECKS["update"]}, {"metamorphic": check_resume}
    between = Bug("the gradient from one stage to the one before lost", "backward", Hooks(loaded=_lose_between_stages))
    swapped = Bug("codes of a frozen matrix with their halves exchanged", "bytes", Hooks(loaded=_swap_nibbles))
    lora = setup.config.lora
    none = None if lora is not None and "experts" in lora.targets else "no adapters on experts"
    copied = Bug("the gradients of copied experts lost", "backward", Hooks(loaded=_lose_copies), refusal=none)
    stale_copies = Bug("adapters of copies as at the start", "forward", Hooks(loaded=_keep_stale), refusal=none)
    placed = Bug("two experts of a placement exchanged", "forward", Hooks(loaded=_swap_slots))
    single = "needs two micro-batches" if len(setup.steps[0].batches(layout, 0).micro_batches) == 1 else None
    exchanged, early = Hooks(loaded=_exchange_gradients), Hooks(loaded=_reduce_early)
    by_layer = [
        Bug("a micro-batch's gradient before the last block exchanged", "backward", exchanged, refusal=single),
        Bug("the last block reduced before its last micro-batch", "backward", early, refusal=single),
    ]
    return [
        Bug("two experts exchanged", "bytes", Hooks(loaded=_swap_experts)),
        *([placed] if setup.config.moe.placement != "contiguous" else []),
        *([copied, stale_copies] if setup.config.moe.replicas else []),
        *([swapped] if setup.config.trained_precision.frozen is not None else []),
        Bug("the first token of a rank gets no expert", "forward", Hooks(loaded=_drop_token)),
        Bug("the router's gradient of other ranks dropped", "backward", Hooks(loaded=_drop_router), refusal=routers),
        *([between] if layout.pp > 1 else []),
        *(by_layer if setup.order.by_layer else []),
        Bug("expert gradients twice as large", "backward", Hooks(backward=_double)),
        Bug("clipped by each rank's own norm", "backward", Hooks(clip=_local_norm), refusal=shards),
        Bug("moments of the step before", "update", Hooks(updated=_stale_moments()), update, stale),
        Bug("moments lost when resuming", "metamorphic", Hooks(resumed=_lose_moments), resume, moments),
    ]


@torch.no_grad()
def _swap_experts(job: ProvenJob) -> None:
    """Exchange the first two experts of the last layer (transformers 45662).

    Collectives: every rank calls it; one all-reduce per tensor of the experts.
    """
    state = job.tensors()
    for experts in expert_tensors(job.model)[-1:]:
        for name in experts.names:
            tensor = as_stored(job.model, name, state[name])
            held = local_tensor(tensor)
            full = job.full(tensor, held)
            (start, middle), (_, stop) = (experts.rows(tensor, number) for number in (0, 1))
            full[start:stop] = torch.cat([full[middle:stop], full[start:middle]])
            held.copy_(cut_local(tensor, full))


def _swap_slots(job: ProvenJob) -> None:
    """Send the tokens of the first two experts of the last layer to each other's slots."""
    for layer in _last_layer(job):
        slots = (layer.slot_E,) if layer.copies is None else (layer.copies.slot_EM, layer.copies.turns_E)
        for slot_E in slots:
            assert slot_E is not None
            slot_E[:2] = slot_E[:2].flip(0)


def _last_layer(job: ProvenJob) -> list[ExpertLayer]:
    """Return the last expert layer; nothing on other stages."""
    names = stage_names(job.model, [job.setup.anatomy.experts[-1].name])
    return [layer_of(job.model.get_submodule(name)) for name in names]


def _lose_copies(job: ProvenJob) -> None:
    """Let no gradient flow back from the adapters of copies."""
    for layer in _last_layer(job):
        assert layer.copies is not None
        layer.copies.exchanged = torch.no_grad()(layer.copies.exchanged)  # type: ignore[method-assign]


def _keep_stale(job: ProvenJob) -> None:
    """Let the adapters of copies be zero, as B is before the first step, with their gradients."""
    for layer in _last_layer(job):
        assert layer.copies is not None
        layer.copies.exchanged = partial(_zeros, layer.copies.exchanged)  # type: ignore[method-assign]


def _zeros(exchanged: Callable[[Sequence[Tensor]], Sequence[Tensor]], own: Sequence[Tensor]) -> list[Tensor]:
    return [value - value.detach() for value in exchanged(own)]


@torch.no_grad()
def _swap_nibbles(job: ProvenJob) -> None:
    """Exchange the halves of each byte in one packed matrix; in a linear layer, if the run packs linear layers."""
    model, state = job.model, job.tensors()
    packed = [local_tensor(tensor) for name, tensor in state.items() if as_stored(model, name, tensor) is not tensor]
    held: list[Any] = [each for each in packed if hasattr(each, "kind")]  # the others are on other stages
    for tensor in sorted(held, key=lambda each: each.kind.by_rows)[-1:]:
        start, stop = tensor.kind.sections[1:]
        codes = tensor.packed_LB[:, start:stop]
        codes.copy_(codes >> 4 | codes << 4)


def _drop_token(job: ProvenJob) -> None:
    spec = job.setup.anatomy.experts[-1]

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        kept = torch.ones(output.shape[:-1], dtype=output.dtype, device=output.device)
        kept.view(-1)[0] = 0  # the last token may be padding, which no check compares
        return output * kept[..., None]

    block = spec.name.rpartition(".")[0] if spec.call == "dense" else spec.name
    for name in stage_names(job.model, [block]):
        module = job.model.get_submodule(name)
        module.register_forward_hook(lambda m, a, out: hook(m, a, out) if isinstance(out, Tensor) else out)


def _drop_router(job: ProvenJob) -> None:
    if job.mesh.data_rank == 0:
        return

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        for value in output if isinstance(output, tuple) else (output,):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(torch.zeros_like)

    for name in stage_names(job.model, job.setup.anatomy.routers):
        job.model.get_submodule(name).register_forward_hook(hook)


def _lose_between_stages(job: ProvenJob) -> None:
    """Zero the gradient that the last stage sends back, as if schedule and FSDP2 disagreed on who runs a backward."""
    pipeline = sharded(job.model).pipeline
    if pipeline is None or not pipeline.is_last(pipeline.local_stages[-1]):
        return

    _change_gradient(job.model.get_submodule(pipeline.blocks[pipeline.stages[-1].start]), torch.zeros_like)


def _change_gradient(block: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Change the gradient of a block's hidden state on its way to the block before."""

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        if hidden.requires_grad:
            hidden.register_hook(change)

    block.register_forward_pre_hook(hook, with_kwargs=True)


def _exchange_gradients(job: ProvenJob) -> None:
    """Give each micro-batch the gradient before the last block that belongs to the one before, or to another token."""
    before: list[Tensor] = []

    def exchange(gradient: Tensor) -> Tensor:
        other = before.pop() if before else gradient
        before.append(gradient)
        return other if other.shape == gradient.shape and other is not gradient else gradient.roll(1, 1)

    _change_gradient(job.model.get_submodule(layers_of(job.model).pipeline.blocks[-1]), exchange)


def _reduce_early(job: ProvenJob) -> None:
    """Reduce the gradients of the last layer in the backward before the last one, whose own are lost."""
    layers = layers_of(job.model)
    forwards = backwards = 0

    def begin_backward(gradient: Tensor) -> None:
        nonlocal backwards
        backwards += 1
        for unit in layers.units[-1]:
            unit.set_requires_gradient_sync(backwards % forwards == forwards - 1, recurse=False)

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal forwards
        hidden = output if isinstance(output, Tensor) else output[0]
        if hidden.requires_grad:
            forwards += 1
            hidden.register_hook(begin_backward)

    job.model.get_submodule(layers.pipeline.blocks[-1]).register_forward_hook(hook)


@torch.no_grad()
def _double(job: ProvenJob) -> None:
    inside = tuple(f"{spec.name}." for spec in job.setup.anatomy.experts)
    found = {name: p for name, p in job.parameters().items() if name.startswith(inside)}
    if not any(gather_objects(bool(found))):  # the run may have no adapters on experts
        found = job.parameters()
    for parameter in found.values():
        if parameter.grad is not None:
            local_tensor(parameter.grad).mul_(2)


@torch.no_grad()
def _local_norm(job: ProvenJob, max_norm: float | None) -> float:
    own = [local_tensor(p.grad) for p in job.parameters().values() if p.grad is not None]
    norm = float(torch.stack([each.double().square().sum() for each in own]).sum().sqrt())
    for each in own:
        each.mul_(1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6)))
    return norm


def _stale_moments() -> Callable[[ProvenJob], None]:
    """Return a hook that sets the last rank's moments after the second step to those after the first step."""
    before: list[dict[str, Tensor]] = []

    @torch.no_grad()
    def hook(job: ProvenJob) -> None:
        if job.mesh.rank != job.mesh.layout.world_size - 1:
            return
        held = {name: local_tensor(value) for name, value in job.optimizer_tensors().items() if value.dim()}
        if not before:
            before.append({name: value.clone() for name, value in held.items()})
        elif before[-1]:
            for name, value in held.items():
                value.copy_(before[-1][name])
            before.append({})

    return hook


@torch.no_grad()
def _lose_moments(job: ProvenJob) -> None:
    """Zero the moments of the last rank, as if only those of the other ranks had been saved."""
    if job.mesh.rank == job.mesh.layout.world_size - 1:
        for value in job.optimizer_tensors().values():
            if value.dim():
                local_tensor(value).zero_()


def zero_half_of_each_adapter(directory: Path) -> None:
    """Zero the second half of the rows of each B in a directory with a saved adapter."""
    tensors = load_file(directory / WEIGHTS_FILE)
    for name, value in tensors.items():
        if "lora_B" in name:
            value[len(value) // 2 :] = 0
    save_file(tensors, directory / WEIGHTS_FILE, {"format": "pt"})


def self_test(proof: Proof) -> list[Mutation]:
    """Plant every bug and return which checks caught it; the reference's results are reused.

    Collectives: every rank calls it; those of building jobs and of the checks.
    """
    config = proof.setup.config
    setup = replace(proof.setup, config=config.model_copy(update={"precision": in_float32(config.precision)}))
    sound = Proof(setup, proof.scratch, proof.results, proof.trajectories, uses_float64=False)
    found, planted = [], bugs(sound)
    # What fp32 alone cannot tell fails without a bug as well.
    without = _failed(sound, Bug("none", "", Hooks(), _checks_of(planted))) if proof.own_error else []
    for bug in planted:
        if bug.refusal is not None:
            found.append(Mutation(bug.name, bug.expected, why_not=bug.refusal))
            continue
        failed = _failed(sound, bug)
        caught = tuple(each for each in failed if each not in without)
        lost = any(layer == bug.expected for layer, _ in failed) and all(layer != bug.expected for layer, _ in caught)
        why_not = "without it the same checks fail in fp32, as rounding alone is as large" if lost else ""
        found.append(Mutation(bug.name, bug.expected, caught, why_not))
    return [*found, _adapter_bug(setup, proof.scratch)]


def _checks_of(planted: Sequence[Bug]) -> Checks:
    return {layer: run for bug in planted if bug.refusal is None for layer, run in bug.checks.items()}


def _failed(sound: Proof, bug: Bug) -> list[tuple[str, str]]:
    """Return the layer and the name of each check that fails on a job with the bug, which is then freed."""
    broken = sound.planted(bug.hooks)
    failed = [
        (layer, check.name) for layer, run in bug.checks.items() for check in run(broken) if check.status == "fail"
    ]
    del broken
    gc.collect()
    return failed


def _adapter_bug(setup: Setup, scratch: Path) -> Mutation:
    """Plant zeros in half of each saved B, as if one rank's rows alone were saved (axolotl 3772).

    It runs on a job with adapters: those of the run, or small ones if the run has none.
    """
    name, expected, config = "half of each adapter's rows zeroed", "artifacts", setup.config
    if setup.weights_seed is not None:
        return Mutation(name, expected, why_not="random weights get no adapters")
    # PEFT cannot read adapters on the experts of some families; then attention alone gets adapters.
    wanted = [LoraConfig(r=4, alpha=8.0, targets=targets) for targets in (("attention", "experts"), ("attention",))]
    checks: list[Check] = []
    for lora in [config.lora] if config.lora is not None else wanted:
        adapted = replace(setup, config=config.model_copy(update={"lora": lora}))
        broken = Proof(adapted, scratch, hooks=Hooks(saved=zero_half_of_each_adapter), uses_float64=False)
        try:
            checks = check_artifacts(broken, merges=False)
            break
        except InputError as error:
            why_not = str(error)
    if not checks:
        return Mutation(name, expected, why_not=why_not)
    if all(check.status == "not run" for check in checks):
        return Mutation(name, expected, why_not=checks[-1].note)
    return Mutation(name, expected, tuple((expected, check.name) for check in checks if check.status == "fail"))
