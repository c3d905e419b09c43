"""The proof of adapters on one family: on attention and routed experts they train as stock PEFT's do.

The model is the one of proof.py; PEFT adapts it unsharded, with a random B, and trains two steps row by row. Real gloo
ranks load the same model and the files that PEFT wrote, take the same steps on different rows per data rank, and save;
stock PEFT reads that again. Compared are losses, every adapter's gradient, the adapters after both steps, and logits.
"""

import importlib
import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import PreTrainedModel

import expertmesh as em
from expertmesh.adapters.peft_format import file_keys, is_parameter, peft_keys
from expertmesh.adapters.plan import plan_adapters
from expertmesh.adapters.targets import Target
from expertmesh.config.errors import InputError
from expertmesh.state.model_view import sharded
from expertmesh.verification.reference import unsharded
from expertmesh.weights.meta_model import build_meta_model
from tests.adapters.reference import in_files, random_adapter, trainables
from tests.families.proof import OPTIM, STEPS, TOLERANCE, Errors, Layout, Proof, error_of, floor_of, rows_of
from tests.families.tiny import EXPERTS, model_class_of, random_model
from tests.support.ranks import shared_ranks
from tests.support.reference import add_gradients, whole

LAYOUTS: tuple[Layout, ...] = ((2, 2, "grouped_mm"), (4, 2, "loop"))
Tensors = dict[str, torch.Tensor]


class NoAdapters(Exception):
    """Adapters on this family's experts are refused, or PEFT itself has none for it; the message says why."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What stock PEFT gave, by its own keys; `floor` as in proof.py."""

    losses: list[float]
    gradients: Tensors
    final: Tensors
    floor: float


def prove_adapters(model_class: str, family: str, scratch: Path, layouts: Sequence[Layout] = LAYOUTS) -> Proof:
    """As `proof.prove`, of adapters. Raises `NoAdapters` where there is nothing to prove."""
    errors = measure(model_class, family, scratch / "fp32", layouts, torch.float32)
    if max(errors.gradient, errors.loss, errors.weight) <= TOLERANCE:
        return Proof(errors)
    exact = measure(model_class, family, scratch / "fp64", layouts, torch.float64)
    for what in ("gradient", "loss", "weight"):
        error = getattr(exact, what)
        assert error <= TOLERANCE, f"adapters: {what} is off by {error:.1e} also in fp64 ({exact.tensor} is worst)"
    own = _own_error(model_class, family, scratch)
    assert errors.gradient <= 3 * own, (
        f"adapters: gradient of {errors.tensor} is off by {errors.gradient:.1e}, unsharded {own:.1e}"
    )
    return Proof(errors, exact, own)


def measure(model_class: str, family: str, scratch: Path, layouts: Sequence[Layout], dtype: torch.dtype) -> Errors:
    """The errors of adapters on a family in `dtype`; raises where the files are not the trained adapters."""
    random_model(model_class, family, dtype).save_pretrained(scratch / "random")
    kind = model_class_of(model_class, family)
    kind.from_pretrained(scratch / "random", dtype=dtype).save_pretrained(scratch / "source")
    model = kind.from_pretrained(scratch / "source", dtype=dtype)
    expected = _train_peft(model, scratch / "adapter")
    found = []
    for world, ep, compute in layouts:
        target = scratch / f"world{world}-ep{ep}"
        moe = em.MoeConfig(compute="loop" if dtype == torch.float64 else compute)
        paths = (scratch / "source", scratch / "adapter", target)
        errors, final, logits, names = shared_ranks(_rank, world, paths, ep, moe, expected, dtype)[0]
        stored = {names[key]: tensor for key, tensor in load_file(target / "adapter_model.safetensors").items()}
        assert stored.keys() == final.keys()
        assert all(torch.equal(stored[key], final[key]) for key in final), "the file does not hold what was trained"
        read = _logits(read_by_peft(target, dtype))
        off = error_of(read, logits, 0.0)
        found.append(Errors(errors.gradient, errors.tensor, max(errors.loss, off), errors.weight))
    gradient, tensor = max((errors.gradient, errors.tensor) for errors in found)
    return Errors(gradient, tensor, max(errors.loss for errors in found), max(errors.weight for errors in found))


def read_by_peft(adapter: Path, dtype: torch.dtype) -> Any:
    """Stock PEFT's model of an adapter, on the class and the files that the adapter names, as docs/lora.md has it."""
    config = peft.PeftConfig.from_pretrained(str(adapter))
    named = config.auto_mapping
    kind = getattr(importlib.import_module(named["parent_library"]), named["base_model_class"])
    base = kind.from_pretrained(config.base_model_name_or_path, dtype=dtype)
    base.set_experts_implementation("eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing adapter keys.*")
        return peft.PeftModel.from_pretrained(base, str(adapter))


def _train_peft(model: PreTrainedModel, directory: Path) -> Expected:
    """Stock PEFT from a random adapter, which is saved to `directory`. Raises `NoAdapters` with PEFT's own words."""
    modules, parameters = adapted_names(model)
    model.set_experts_implementation("eager")
    try:
        adapted = random_adapter(model.train(), directory, modules, parameters)
        return _steps(adapted)
    except Exception as error:
        raise NoAdapters(f"PEFT: {type(error).__name__}: {error}") from error


def adapted_names(model: PreTrainedModel) -> tuple[list[str], list[str]]:
    """PEFT's target_modules and target_parameters for experts and attention; `NoAdapters` where there are none."""
    targets = _targets(build_meta_model(model.config, model.dtype))
    modules = [target.name for target in targets if not is_parameter(target)]
    return modules, [target.weight for target in targets if is_parameter(target)]


def _targets(model: PreTrainedModel) -> tuple[Target, ...]:
    """Experts and attention, or experts alone where attention is refused; `NoAdapters` where experts are."""
    refusals = []
    for groups in (("experts", "attention"), ("experts",)):
        try:
            return plan_adapters(model, em.LoraConfig(targets=groups), None).targets
        except InputError as error:
            refusals.append(str(error))
    raise NoAdapters(f"refused: {refusals[-1]}")


def _steps(adapted: Any) -> Expected:
    trained = {name.replace(".default", ""): p for name, p in adapted.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), **OPTIM)
    rows = ([(row, row) for row in rows_of(step)] for step in range(STEPS))
    run = unsharded.train(trained, optimizer, rows, partial(add_gradients, adapted))
    gradients = {name: run.gradients.get(name, torch.zeros_like(p)) for name, p in trained.items()}
    final = {name: parameter.detach().clone() for name, parameter in trained.items()}
    return Expected(run.losses, gradients, final, floor_of(gradients))


def _own_error(model_class: str, family: str, scratch: Path) -> float:
    """How far stock PEFT's gradients on the unsharded fp32 model are from its own in fp64: the worst tensor."""
    kind, found = model_class_of(model_class, family), []
    for dtype in (torch.float32, torch.float64):
        model = kind.from_pretrained(scratch / "fp32" / "source", dtype=dtype)
        model.set_experts_implementation("eager")
        found.append(_steps(peft.PeftModel.from_pretrained(model.train(), scratch / "fp32/adapter", is_trainable=True)))
    fp32, fp64 = found
    return max(error_of(fp32.gradients[name], gradient, fp64.floor) for name, gradient in fp64.gradients.items())


def _rank(
    paths: tuple[Path, Path, Path], ep: int, moe: em.MoeConfig, expected: Expected, dtype: torch.dtype
) -> tuple[Errors, Tensors, torch.Tensor, dict[str, str]]:
    """One rank's work; every rank returns the same: errors, the trained adapters by PEFT's keys, logits, and PEFT's
    keys by those of our file.
    """
    source, adapter, target = paths
    mesh = em.init_mesh(em.ParallelConfig(ep=ep), num_experts=EXPERTS)
    name: Any = str(dtype).removeprefix("torch.")
    precision = em.PrecisionConfig(params=name, compute=name, reduce=name)
    lora = em.LoraConfig(from_adapter=str(adapter))
    model = em.load_model(source, mesh, precision=precision, moe=moe, lora=lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **OPTIM)
    loss_error, gradients = 0.0, Tensors()
    for step in range(STEPS):
        rows = rows_of(step)
        targets = sum(len(row) - 1 for row in rows)
        total = torch.zeros((), dtype=torch.float64)
        for row in rows[mesh.data_rank :: mesh.layout.data_ranks]:
            batch = {"input_ids": row[None], "labels": row[None], "attention_mask": torch.ones_like(row)[None]}
            loss = em.causal_lm_loss(model, batch, target_tokens=targets, chunk_tokens=16)
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        loss_error = max(loss_error, abs(float(total) / expected.losses[step] - 1))
        if step == 0:
            trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
            given = whole({n: p.grad for n, p in trained.items() if p.grad is not None})
            gradients = {n: given.get(n, torch.zeros(p.shape)) for n, p in trained.items()}
        optimizer.step()
        optimizer.zero_grad()
    first, final = in_files(model, gradients), in_files(model, trainables(model))
    assert first.keys() == expected.gradients.keys()
    gradient, tensor = max(
        (error_of(first[key], want, expected.floor), key) for key, want in expected.gradients.items()
    )
    weight = max(error_of(final[key], value, 1e-8) for key, value in expected.final.items())
    em.save_adapter(model, target)
    plan = sharded(model).lora_plan
    assert plan is not None
    names = [
        zip(file_keys(target, plan.targets), peft_keys(target, plan.targets), strict=True) for target in plan.targets
    ]
    return Errors(gradient, tensor, loss_error, weight), final, _logits(model), dict(itertools.chain(*names))


def _logits(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=rows_of(0)[0][None], use_cache=False).logits
    return logits.clone()
