"""Layer 7, `--self-test`: plants known bugs in the job, one at a time, and shows that the right layer turns red.

Each bug is one that was shipped somewhere, or its smallest relative: plausible loss, wrong result. The reference is
never touched. A bug that the run leaves no room for (one rank, no moments) is reported as not planted.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from expertmesh.adapters.peft_format import WEIGHTS_FILE
from expertmesh.config import LoraConfig
from expertmesh.config.errors import InputError
from expertmesh.parallel.pipeline import pipeline_of
from expertmesh.state.shards import local_tensor
from expertmesh.state.stage_view import stage_names
from expertmesh.verification.compare import gathered
from expertmesh.verification.layers.artifacts import check_artifacts
from expertmesh.verification.layers.backward import check_backward
from expertmesh.verification.layers.bytes import check_bytes
from expertmesh.verification.layers.forward import check_forward
from expertmesh.verification.layers.metamorphic import check_resume
from expertmesh.verification.layers.update import check_update
from expertmesh.verification.proof import Expectations, Proof
from expertmesh.verification.result import Check, Mutation
from expertmesh.verification.setup import Setup, in_float32
from expertmesh.verification.subject import Subject, all_tensors
from expertmesh.weights.load import expert_tensors

Layers = Sequence[tuple[str, Callable[[Proof], list[Check]]]]
PASSES: Layers = (("bytes", check_bytes), ("forward", check_forward), ("backward", check_backward))


@dataclass(frozen=True, slots=True)
class Bug:
    """One bug: what it is, the layer that has to catch it, and how to make a proof of a job that has it.

    `layers` are run on it; `refusal` says why it cannot be planted.
    """

    name: str
    expected: str
    plant: Callable[[Proof], None]
    layers: Layers = PASSES
    refusal: str | None = None


def self_test(setup: Setup, expectations: Expectations, scratch: Path) -> list[Mutation]:
    """Plant every bug and report who caught it. Every rank calls it; the reference's results are used again."""
    config = setup.config
    setup = replace(setup, config=config.model_copy(update={"precision": in_float32(config.precision)}))
    found = []
    for bug in bugs(setup, scratch):
        if bug.refusal is not None:
            found.append(Mutation(bug.name, bug.expected, why_not=bug.refusal))
            continue
        proof = Proof(setup, expectations, escalates=False)
        bug.plant(proof)
        caught = []
        for layer, check in bug.layers:
            caught += [(layer, each.name) for each in check(proof) if each.status == "fail"]
        found.append(Mutation(bug.name, bug.expected, tuple(caught)))
        del proof
        gc.collect()
    return [*found, _zeroed_adapter(setup, scratch)]


def bugs(setup: Setup, scratch: Path) -> list[Bug]:
    """All bugs but the adapter's, which needs a job with adapters; those between stages only where there are some."""
    layout = setup.layout
    alone = "needs two data ranks" if layout.data_ranks == 1 else None
    routers = alone or _why_no_router(setup)
    shards = "needs two ranks that share a model" if layout.world_size == layout.replicate else None
    moments = "sgd keeps no moments" if setup.config.optim.name == "sgd" else None
    between = Bug("the gradient from one stage to the one before lost", "backward", _set(tamper=_lose_between_stages))
    return [
        Bug("two experts exchanged", "bytes", _set(tamper=_swap_experts)),
        Bug("the first token of a rank gets no expert", "forward", _set(tamper=_drop_token)),
        Bug("the router's gradient of other ranks dropped", "backward", _set(tamper=_drop_router), refusal=routers),
        Bug("expert gradients twice as large", "backward", _set(tamper_gradients=_double)),
        *([between] if layout.pp > 1 else []),
        Bug("clipped by each rank's own norm", "backward", _set(clip=_local_norm), refusal=shards),
        Bug("moments of the step before", "update", _stale, (("update", check_update),), moments),
        Bug(
            "moments lost when resuming",
            "metamorphic",
            _set(tamper_resumed=_lose_moments),
            (("metamorphic", lambda proof: [check_resume(proof, scratch)]),),
            moments,
        ),
    ]


def _set(**fields: Any) -> Callable[[Proof], None]:
    def plant(proof: Proof) -> None:
        for name, value in fields.items():
            setattr(proof, name, value)

    return plant


@torch.no_grad()
def _swap_experts(subject: Subject) -> None:
    """The last layer's on the last rank that has some; where it holds less than two, all ranks of its stage get those
    of the stage's first (transformers 45662).
    """
    state = all_tensors(subject)
    for experts in expert_tensors(subject.model)[-1:]:
        for name in experts.names:
            local = local_tensor(state[name])
            share = state[name].shape[0] // experts.count
            shapes = gathered(tuple(local.shape) if local.numel() else None)
            holders = [rank for rank, shape in enumerate(shapes) if shape is not None]
            if shapes[holders[-1]][0] < 2 * share:
                there = local.contiguous() if subject.mesh.rank == holders[0] else local.new_empty(shapes[holders[0]])
                there = there.to(subject.mesh.device)  # ranks of other stages have nothing on their device
                dist.broadcast(there, src=holders[0])
                if there.shape == local.shape:
                    local.copy_(there)
            elif subject.mesh.rank == holders[-1]:
                first = local[:share].clone()
                local[:share] = local[share : 2 * share]
                local[share : 2 * share] = first


def _drop_token(subject: Subject) -> None:
    spec = subject.setup.anatomy.experts[-1]

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        kept = torch.ones(output.shape[:-1], dtype=output.dtype, device=output.device)
        kept.view(-1)[0] = 0  # the last one may be padding, which nobody misses
        return output * kept[..., None]

    block = spec.name.rpartition(".")[0] if spec.call == "dense" else spec.name
    for name in stage_names(subject.model, [block]):
        module = subject.model.get_submodule(name)
        module.register_forward_hook(lambda m, a, out: hook(m, a, out) if isinstance(out, Tensor) else out)


def _drop_router(subject: Subject) -> None:
    if subject.mesh.data_rank == 0:
        return

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        for value in output if isinstance(output, tuple) else (output,):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(torch.zeros_like)

    for name in stage_names(subject.model, subject.setup.anatomy.routers):
        subject.model.get_submodule(name).register_forward_hook(hook)


def _why_no_router(setup: Setup) -> str | None:
    if not setup.anatomy.routers:
        return "no router is recognised"
    if setup.config.lora is not None or setup.config.moe.router == "frozen":
        return "routers are not trained"
    return None


def _lose_between_stages(subject: Subject) -> None:
    """On the last stage, as where a schedule and FSDP2 disagree on who runs a module's backward."""
    pipeline = pipeline_of(subject.model)
    if pipeline is None or not pipeline.is_last(pipeline.own_stages[-1]):
        return

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        if hidden.requires_grad:
            hidden.register_hook(torch.zeros_like)

    first = pipeline.blocks[pipeline.stages[-1].start]
    subject.model.get_submodule(first).register_forward_pre_hook(hook, with_kwargs=True)


@torch.no_grad()
def _double(subject: Subject) -> None:
    inside = tuple(f"{spec.name}." for spec in subject.setup.anatomy.experts)
    found = {name: p for name, p in subject.parameters().items() if name.startswith(inside)}
    if not any(gathered(bool(found))):  # adapters may leave experts alone
        found = subject.parameters()
    for parameter in found.values():
        if parameter.grad is not None:
            local_tensor(parameter.grad).mul_(2)


@torch.no_grad()
def _local_norm(subject: Subject, max_norm: float | None) -> float:
    own = [local_tensor(p.grad) for p in subject.parameters().values() if p.grad is not None]
    norm = float(torch.stack([each.double().square().sum() for each in own]).sum().sqrt())
    for each in own:
        each.mul_(1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6)))
    return norm


def _stale(proof: Proof) -> None:
    """After its second step, one rank goes on with the moments that it had after the first."""
    before: dict[Any, dict[str, Tensor]] = {}
    steps = [0]

    @torch.no_grad()
    def tamper(subject: Subject) -> None:
        steps[0] += 1
        if subject.mesh.rank != subject.mesh.layout.world_size - 1:
            return
        for parameter, state in subject.optimizer.state.items():
            if steps[0] == 2:
                for slot, value in before[parameter].items():
                    local_tensor(state[slot]).copy_(value)
            else:
                before[parameter] = {slot: local_tensor(state[slot]).clone() for slot in ("exp_avg", "exp_avg_sq")}

    proof.tamper_optimizer = tamper


@torch.no_grad()
def _lose_moments(subject: Subject) -> None:
    """One rank starts with none, as if only the others' had been saved."""
    if subject.mesh.rank == subject.mesh.layout.world_size - 1:
        for state in subject.optimizer.state.values():
            for slot in ("exp_avg", "exp_avg_sq"):
                local_tensor(state[slot]).zero_()


def _zeroed_adapter(setup: Setup, scratch: Path) -> Mutation:
    """The saved adapter holds one rank's rows of each B, the rest zeros (axolotl 3772)."""
    name, expected = "half of each adapter's rows zeroed", "artifacts"
    # Experts of some families cannot have adapters that PEFT reads; attention does as well.
    wanted = [LoraConfig(r=4, alpha=8.0, targets=targets) for targets in (("attention", "experts"), ("attention",))]
    checks: list[Check] = []
    for lora in [setup.config.lora] if setup.config.lora is not None else wanted:
        adapted = replace(setup, config=setup.config.model_copy(update={"lora": lora}))
        try:
            checks = check_artifacts(Proof(adapted, tamper_files=_zero_rows, escalates=False), scratch, merges=False)
            break
        except InputError as error:
            why_not = str(error)
    if not checks:
        return Mutation(name, expected, why_not=why_not)
    if all(check.status == "not run" for check in checks):
        return Mutation(name, expected, why_not=checks[-1].note)
    return Mutation(name, expected, tuple((expected, each.name) for each in checks if each.status == "fail"))


def _zero_rows(directory: Path) -> None:
    tensors = load_file(directory / WEIGHTS_FILE)
    for name, value in tensors.items():
        if "lora_B" in name:
            value[len(value) // 2 :] = 0
    save_file(tensors, directory / WEIGHTS_FILE, {"format": "pt"})
