"""The reference of adapter proofs: stock PEFT on the unsharded model, row by row, and the same steps on ranks."""

import atexit
import copy
import functools
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn

import expertmesh as em
from expertmesh.adapters.peft_format import peft_keys
from expertmesh.distributed.mesh import Mesh
from expertmesh.state.model_view import mesh_of, sharded
from tests.families.tiny import random_model
from tests.support.models import tiny_model
from tests.support.reference import (
    Row,
    equal_on_every_rank,
    of_all_stages,
    relative_error,
    rows_of_step,
    steps_in,
    take_steps,
    unsharded_steps,
    whole,
    worst,
)

R, ALPHA = 4, 8.0
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
    """A tiny model of `family`, with `TARGETS` unless others are given. `changes` go into its config.

    Computed once in the test process; `directory` gets the adapter that it starts from.
    """
    named = modules if isinstance(modules, str) else tuple(modules)
    run = _tiny_peft_run(family, named, tuple(parameters), tuple(confined), prepare, dtype, tuple(lora), **changes)
    shutil.copytree(run.start, directory, dirs_exist_ok=True)
    return replace(run, start=directory)


@functools.cache
def _tiny_peft_run(
    family: str,
    modules: Sequence[str],
    parameters: Sequence[str],
    confined: Sequence[int],
    prepare: Callable[[nn.Module], None] | None,
    dtype: torch.dtype,
    lora: Sequence[tuple[str, Any]],
    **changes: Any,
) -> PeftRun:
    directory = Path(tempfile.mkdtemp(prefix="peft-"))
    atexit.register(shutil.rmtree, directory)
    if family in _CLASSES:
        model: nn.Module = random_model(_CLASSES[family], family, dtype)
        model.set_experts_implementation("eager")  # type: ignore[operator]
    else:
        model = tiny_model(family, dtype=dtype, **changes)
    if prepare is not None:
        prepare(model)
    if not modules and not parameters:
        modules, parameters = TARGETS[family]
    said = {key: dict(value) if key.endswith("_pattern") else value for key, value in lora}
    said = {key: list(value) if isinstance(value, tuple) else value for key, value in said.items()}
    return peft_run(model.train(), directory, modules, parameters, confined, **said)


def peft_run(
    model: nn.Module,
    directory: Path,
    modules: Sequence[str],
    parameters: Sequence[str],
    confined: Sequence[int] = (),
    **lora: Any,
) -> PeftRun:
    """Start PEFT's adapter with random B as well, save it to `directory`, and train it for some clipped steps."""
    initial = copy.deepcopy(model)
    adapted = random_adapter(model, directory, modules, parameters, **lora)
    named = {re.sub(r"(\.modules_to_save)?\.default", "", name): p for name, p in adapted.named_parameters()}
    trained = {name: p for name, p in named.items() if p.requires_grad}
    rows = [rows_of_step(step, confined) for step in range(steps_in(next(model.parameters()).dtype))]
    run, final = unsharded_steps(adapted, trained, rows)
    return PeftRun(initial, directory, rows, run.losses, run.norms, run.gradients, final)


def random_adapter(
    model: nn.Module, directory: Path, modules: Sequence[str], parameters: Sequence[str], **lora: Any
) -> Any:
    """PEFT around `model` with an adapter whose B is random too, also saved to `directory`."""
    said: dict[str, Any] = {"r": R, "lora_alpha": ALPHA, "task_type": "CAUSAL_LM", **lora}
    said["target_modules"] = modules if isinstance(modules, str) else list(modules)
    config = peft.LoraConfig(target_parameters=list(parameters), **said)
    torch.manual_seed(5)
    adapted: Any = peft.get_peft_model(model, config)  # type: ignore[arg-type]
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
        elif parameter.requires_grad and "lora_A" not in name:  # modules_to_save, trainable_token_indices
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    adapted.save_pretrained(directory)
    return adapted


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


def train_adapters(
    expected: PeftRun,
    parallel: em.ParallelConfig,
    micro_batch: int = 1,
    moe: em.MoeConfig | None = None,
    tamper: Callable[[nn.Module, Mesh], None] | None = None,
    after: Callable[[Any, Mesh], Any] | None = None,
    as_peft_model: bool = False,
    order: dict[str, Any] | None = None,
    **options: Any,
) -> AdapterDistance:
    """The reference's steps on ranks, from the same adapter; every rank calls it.

    `as_peft_model`: it comes in a PeftModel, not in a directory. `tamper` plants a bug before training; what `after`
    gives for the trained model goes into the result. `order`: as in `train_sharded`.
    """
    model: Any = copy.deepcopy(expected.initial)
    mesh = em.init_mesh(parallel)
    if as_peft_model:
        wrapped: Any = peft.PeftModel.from_pretrained(model, str(expected.start), is_trainable=True)
        model = em.parallelize(wrapped, mesh, moe=moe, **options)
    else:
        em.parallelize(model, mesh, moe=moe, lora=em.LoraConfig(from_adapter=str(expected.start)), **options)
    if tamper is not None:
        tamper(model, mesh)
    base = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    before = whole(base)
    taken = take_steps(model, mesh, expected.rows, micro_batch, order)
    unchanged = all(torch.equal(tensor, before[name]) for name, tensor in whole(base).items())
    final = in_files(model, trainables(model))
    return AdapterDistance(
        loss=relative_error(taken.losses, expected.losses),
        norm=relative_error(taken.norms, expected.norms),
        gradient=worst(in_files(model, taken.gradients), expected.gradients),
        weight=worst(final, expected.final),
        base_unchanged=unchanged,
        replicas_equal=equal_on_every_rank(final),
        after=None if after is None else after(model, mesh),
    )


def trainables(model: nn.Module) -> dict[str, torch.Tensor]:
    """Everything that trains, whole, by our names. Collective."""
    return of_all_stages(model, mesh_of(model), lambda p: p)


def in_files(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole adapters by our names, in PEFT's layout by PEFT's keys; written out here once more, in plain torch."""
    plan = sharded(model).lora_plan
    assert plan is not None
    files = {}
    for target in plan.targets:
        a, b = (tensors[f"{target.module}.{leaf}"].detach() for leaf in target.leaves)
        key_a, key_b = peft_keys(target, plan.targets)
        if target.experts is not None:
            if target.swapped:
                a, b = b.mT, a.mT
            experts, r, _ = a.shape
            a = torch.cat([a[expert] for expert in range(experts)])
            b = torch.stack([b[expert, :, column] for column in range(r) for expert in range(experts)], dim=1)
        files[key_a], files[key_b] = a, b
    return files | {each.key: tensors[f"{weight}_lora_W"].detach() for weight, each in plan.replaced.items()}
