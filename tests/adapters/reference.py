"""The reference of adapter proofs: stock PEFT on the unsharded model, row by row, and the same steps on ranks."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import expertmesh as em
from expertmesh.adapters.peft_format import file_keys
from expertmesh.adapters.plan import plan_of
from expertmesh.distributed.mesh import Mesh, mesh_of
from tests.families.tiny import random_model
from tests.support.models import tiny_model
from tests.support.reference import OPTIM, Row, _equal_on_every_rank, _rows, of_all_stages, padded

STEPS, MAX_NORM, R, ALPHA = 4, 0.5, 4, 8.0
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# By family: PEFT's target_modules and target_parameters for attention, router and experts, and what else there is.
TARGETS: dict[str, tuple[list[str], list[str]]] = {
    "qwen3_moe": (["q_proj", "v_proj"], [*EXPERTS, "mlp.gate.weight"]),
    "mixtral": (["k_proj", "o_proj"], [*EXPERTS, "mlp.gate.weight"]),
    "deepseek_v3": (
        ["q_a_proj", "kv_b_proj", "o_proj"],
        [*EXPERTS, "mlp.gate.weight", "shared_experts.up_proj.weight", "0.mlp.down_proj.weight"],
    ),
    "gpt_oss": (["q_proj", "o_proj"], [*EXPERTS, "mlp.router.weight"]),
    "glm4_moe": (["q_proj", "v_proj"], [*EXPERTS, "mlp.gate.weight", "shared_experts.down_proj.weight"]),
    "olmoe": (["q_proj", "o_proj"], [*EXPERTS, "mlp.gate.weight"]),
}
_CLASSES = {
    "gpt_oss": "GptOssForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "llama4": "Llama4ForCausalLM",
}


@dataclass(frozen=True, slots=True)
class PeftRun:
    """What stock PEFT gave: losses, norms, the first step's gradients and the final adapter, by PEFT's file keys."""

    initial: nn.Module
    start: Path
    rows: list[list[Row]]
    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    final: dict[str, torch.Tensor]


def tiny_peft_run(
    family: str,
    directory: Path,
    modules: Sequence[str] = (),
    parameters: Sequence[str] = (),
    confined: Sequence[int] = (),
    prepare: Callable[[nn.Module], None] | None = None,
    dtype: torch.dtype = torch.float32,
    lora: Sequence[tuple[str, Any]] = (),
    **changes: Any,
) -> PeftRun:
    """A tiny model of `family`, with `TARGETS` unless others are given. `changes` go into its config."""
    if family in _CLASSES:
        model: nn.Module = random_model(_CLASSES[family], family, dtype)
        model.set_experts_implementation("eager")  # type: ignore[operator]
    else:
        model = tiny_model(family, dtype=dtype, **changes)
    if prepare is not None:
        prepare(model)
    if not modules and not parameters:
        modules, parameters = TARGETS[family]
    return peft_run(model.train(), directory, modules, parameters, confined, **dict(lora))


def peft_run(
    model: nn.Module,
    directory: Path,
    modules: Sequence[str],
    parameters: Sequence[str],
    confined: Sequence[int] = (),
    **lora: Any,
) -> PeftRun:
    """Start PEFT's adapter with random B as well, save it to `directory`, and train it for `STEPS` clipped steps."""
    initial = copy.deepcopy(model)
    adapted = random_adapter(model, directory, modules, parameters, **lora)
    trained = {name.replace(".default", ""): p for name, p in adapted.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), **OPTIM)
    rows = [_rows(step, confined) for step in range(STEPS)]
    losses, norms, gradients = [], [], {}
    for step_rows in rows:
        losses.append(peft_step(adapted, step_rows))
        gradients = gradients or {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained.values(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    final = {name: parameter.detach().clone() for name, parameter in trained.items()}
    return PeftRun(initial, directory, rows, losses, norms, gradients, final)


def random_adapter(
    model: nn.Module, directory: Path, modules: Sequence[str], parameters: Sequence[str], **lora: Any
) -> Any:
    """PEFT around `model` with an adapter whose B is random too, also saved to `directory`."""
    said: dict[str, Any] = {"r": R, "lora_alpha": ALPHA, "task_type": "CAUSAL_LM", **lora}
    config = peft.LoraConfig(target_modules=list(modules), target_parameters=list(parameters), **said)
    torch.manual_seed(5)
    adapted: Any = peft.get_peft_model(model, config)  # type: ignore[arg-type]
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(directory)
    return adapted


def peft_step(adapted: Any, rows: Sequence[Row]) -> float:
    """The loss of one step, with its gradients."""
    total = sum(int((labels[1:] != -100).sum()) for _, labels in rows)
    loss = 0.0
    for ids, labels in rows:
        logits = adapted(input_ids=ids[None], use_cache=False).logits[0]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        share = F.cross_entropy(logits[:-1], labels[1:], reduction="sum", ignore_index=-100) / total
        share.backward()
        loss += float(share.detach())
    return loss


@dataclass(frozen=True, slots=True)
class AdapterDistance:
    """How far adapters trained on ranks are from stock PEFT's; relative, the worst tensor named. `after`: see below."""

    loss: float
    norm: float
    gradient: tuple[float, str]
    weight: tuple[float, str]
    base_unchanged: bool
    replicas_equal: bool
    after: Any = None

    def check(self, tolerance: float) -> None:
        assert self.loss <= tolerance, self
        assert self.norm <= tolerance, self
        assert self.gradient[0] <= tolerance, self
        assert self.weight[0] <= tolerance, self
        assert self.base_unchanged, self
        assert self.replicas_equal, self


@dataclass(frozen=True, slots=True)
class Taken:
    """What steps on ranks gave; gradients are the first step's, whole, by our names."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]


def train_adapters(
    expected: PeftRun,
    parallel: em.ParallelConfig,
    micro_batch: int = 1,
    moe: em.MoeConfig | None = None,
    tamper: Callable[[nn.Module, Mesh], None] | None = None,
    after: Callable[[Any, Mesh], Any] | None = None,
    **options: Any,
) -> AdapterDistance:
    """The reference's steps on ranks, from the same adapter; every rank calls it.

    `tamper` plants a bug before training; what `after` gives for the trained model goes into the result.
    """
    model: Any = copy.deepcopy(expected.initial)
    mesh = em.init_mesh(parallel)
    em.parallelize(model, mesh, moe=moe, lora=em.LoraConfig(from_adapter=str(expected.start)), **options)
    if tamper is not None:
        tamper(model, mesh)
    before = {name: full(p) for name, p in model.named_parameters() if not p.requires_grad}
    taken = take_steps(model, mesh, expected.rows, micro_batch)
    unchanged = all(torch.equal(tensor, full(model.get_parameter(name))) for name, tensor in before.items())
    final = in_files(model, trainables(model))
    return AdapterDistance(
        loss=max(abs(a / b - 1) for a, b in zip(taken.losses, expected.losses, strict=True)),
        norm=max(abs(a / b - 1) for a, b in zip(taken.norms, expected.norms, strict=True)),
        gradient=worst(in_files(model, taken.gradients), expected.gradients),
        weight=worst(final, expected.final),
        base_unchanged=unchanged,
        replicas_equal=_equal_on_every_rank(final),
        after=None if after is None else after(model, mesh),
    )


def take_steps(model: Any, mesh: Mesh, rows: Sequence[Sequence[Row]], micro_batch: int = 1) -> Taken:
    """Clipped AdamW steps on this data rank's share of `rows`; every rank calls it."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), **OPTIM, fused=True)
    losses, norms, gradients = [], [], {}
    for step, step_rows in enumerate(rows):
        total = sum(int((labels[1:] != -100).sum()) for _, labels in step_rows)
        mine = range(mesh.data_rank, len(step_rows), mesh.layout.data_ranks)
        loss, batches = torch.zeros((), dtype=torch.float64), []
        for first in range(0, len(mine), micro_batch):
            chosen = mine[first : first + micro_batch]
            batch = padded([step_rows[row] for row in chosen])
            batch["row_numbers"] = torch.tensor([step * len(step_rows) + row for row in chosen])
            batches.append(batch)
        if mesh.layout.pp > 1:
            loss = em.forward_backward(model, batches, target_tokens=total, chunk_tokens=16).loss
        else:
            for batch in batches:
                share = em.causal_lm_loss(model, batch, target_tokens=total, chunk_tokens=16)
                share.backward()
                loss += share.detach()
        dist.all_reduce(loss)
        losses.append(float(loss))
        gradients = gradients or of_all_stages(model, mesh, lambda p: p.grad)
        norms.append(float(em.clip_grad_norm_(model, MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return Taken(losses, norms, gradients)


def trainables(model: nn.Module) -> dict[str, torch.Tensor]:
    """Everything that trains, whole, by our names. Collective."""
    return of_all_stages(model, mesh_of(model), lambda p: p)


def in_files(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole adapters by our names, in PEFT's layout by PEFT's keys; written out here once more, in plain torch."""
    plan = plan_of(model)
    assert plan is not None
    files = {}
    for target in plan.targets:
        a, b = (tensors[f"{target.module}.{leaf}"].detach() for leaf in target.leaves)
        key_a, key_b = file_keys(target, plan.targets)
        if target.experts is not None:
            if target.swapped:
                a, b = b.mT, a.mT
            experts, r, _ = a.shape
            a = torch.cat([a[expert] for expert in range(experts)])
            b = torch.stack([b[expert, :, column] for column in range(r) for expert in range(experts)], dim=1)
        files[key_a], files[key_b] = a, b
    return files


def worst(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative error of any tensor, and its name."""
    assert got.keys() == expected.keys(), (sorted(got)[:4], sorted(expected)[:4])
    errors = [(float((got[n] - expected[n]).norm() / expected[n].norm().clamp_min(1e-12)), n) for n in got]
    assert all(error == error for error, _ in errors), errors  # max would pass over a NaN
    return max(errors)


def full(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()
