"""Give adapters their first values, and remember the base that they belong to.

A starts at random by PEFT's rules, B at zero and what trains whole as the base, or all come from a PEFT directory.
Each target's A, and each expert's, has a generator of its own, seeded by seed, name and expert: a rank makes the
values of its shards without communication, and they do not depend on the layout. From a directory, each rank reads the
parts that it holds.

An adapter on another base is noise, and causes no error by itself. So a hash of the frozen base stands beside every
adapter, and resuming or merging it on another base is refused. The hash sums the bits of each element, weighted by its
place in the full tensor, so that the sums of the ranks add up in any layout. It tells two sets of weights apart and
does not protect against an adversary.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.adapters.peft_config import as_peft_reads, config_selects, lora_of, name_in_config, patterns_in
from expertmesh.adapters.peft_format import (
    BASE_FILE,
    PREFIX,
    WEIGHTS_FILE,
    base_copies,
    differs,
    model_tensors_from,
    not_in_base,
)
from expertmesh.adapters.plan import AdapterPlan
from expertmesh.adapters.targets import Replaced, Target, new_values_of, refuse_slow_patterns
from expertmesh.config import LoraConfig
from expertmesh.config.errors import IntegrityError
from expertmesh.distributed.all_ranks import raise_on_all_ranks, sum_over_ranks
from expertmesh.experts.install import fetch_copies
from expertmesh.experts.lora_state import adapter_state
from expertmesh.io.boxes import Box, blocks, extents, full_box, slices
from expertmesh.io.reading import parse_json, read_file
from expertmesh.io.safetensors_reader import open_weight_files
from expertmesh.state.model_view import ModelView, attach, sharded, stage_names
from expertmesh.state.packed import values_at
from expertmesh.state.shards import held_parts, is_on_other_stage, local_tensor, owns_copy
from expertmesh.weights.first_values import seed_of
from expertmesh.weights.lazy import lazy_tensors, read_box, read_values
from expertmesh.weights.load import refuse_non_finite
from expertmesh.weights.mapping import StateTensor, classifier_head

_FROZEN = (None, "float8", "nf4", "mxfp4", "nvfp4")
_HASHED_ELEMENTS = 1 << 22
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def start_adapters(model: nn.Module, seed: int) -> None:
    """Give every adapter of `model` its first values: those of `seed`, or of the plan's PEFT directory.

    Does nothing for a model without adapters; those of a PeftModel have their values already. Also remembers the hash
    of the frozen weights, and fetches those of experts that this rank copies.

    Args:
        model: Sharded and allocated, with its frozen weights loaded.

    Raises:
        InputError, SecurityError, IntegrityError: Reading the PEFT directory failed.

    Collectives: every rank calls it; one or two small all-reduces on the default group, one for the rows of each
    embedding that train, and those of `fetch_copies`. Errors are raised on all ranks.
    """
    plan, state = sharded(model).lora_plan, adapter_state(model)
    if plan is None or state is None:
        return
    state.seed = seed
    frozen = (p for p in ModelView(model).full.parameters() if not p.requires_grad)
    dtypes = [str(p.dtype).removeprefix("torch.") for p in frozen]
    kinds = {kind.name for kind in (sharded(model).frozen_formats or {}).values() if not kind.published}
    base = Base(content_hash(model), Counter(dtypes).most_common(1)[0][0], min(kinds, default=None))
    attach(model, lora_base=base)
    fetch_copies(model)
    if plan.in_memory:
        return
    if plan.weights is None:
        _start_anew(model, plan.targets, plan.lora, seed)
        for weight, each in plan.replaced.items():
            _start_from_base(model, weight, each)
        return
    with raise_on_all_ranks("reading the adapter"):
        read_adapter(model, plan, plan.weights)


def _start_anew(model: nn.Module, targets: Sequence[Target], lora: LoraConfig, seed: int) -> None:
    """Fill the local shards of the adapters of this stage: A at random, B with zeros."""
    here = set(stage_names(model, [target.module for target in targets]))
    for target in targets:
        if target.module not in here:
            continue
        module = model.get_submodule(target.module)
        leaf_a, leaf_b = target.leaves
        whole = module.get_parameter(leaf_a)
        local_tensor(module.get_parameter(leaf_b)).zero_()
        for box, local in held_parts(whole):
            if target.experts is None:
                local.copy_(_first_values(tuple(whole.shape), lora.init, seed, target.name)[slices(box)])
                continue
            for row, expert in enumerate(range(*box[0])):
                values = _first_values(tuple(whole.shape[1:]), lora.init, seed, f"{target.name}.{expert}")
                local[row].copy_(values[slices(box[1:])])


def _start_from_base(model: nn.Module, weight: str, each: Replaced) -> None:
    """Fill the local shards of new values with the base's, or of what is added to a bias with zeros.

    Collectives: every rank calls it; for rows of a weight one all-reduce of them, `[n, H]`, on the default group.
    """
    view = ModelView(model)
    base, new = view.tensors[weight], view.adapters[new_values_of(weight)]
    if each.scaling is not None:
        for _, local in held_parts(new):
            local.zero_()
        return
    if each.rows is None:
        for (box, local), (of_base, values) in zip(held_parts(new), held_parts(base), strict=True):
            assert box == of_base, (weight, box, of_base)  # of equal shapes, FSDP2 cuts both equally
            local.copy_(values)
        return
    rows_nH = torch.zeros(each.shape, dtype=torch.promote_types(base.dtype, torch.float32))
    for box, values in held_parts(base) if owns_copy(base) else ():
        for number, row in enumerate(each.rows):
            if box[0][0] <= row < box[0][1]:
                rows_nH[number, slice(*box[1])] = values[row - box[0][0]].to(rows_nH)
    rows_nH = sum_over_ranks(rows_nH)
    for box, local in held_parts(new):
        local.copy_(rows_nH[slices(box)])


def _first_values(shape: tuple[int, ...], init: str, seed: int, name: str) -> torch.Tensor:
    """Return A `[r, in]` in fp32: uniform in ±1/sqrt(in) (Kaiming with a = sqrt(5)), or normal with deviation 1/r.

    Draws all of A on the CPU, so that a caller who takes its shard gets the same values in every layout.
    """
    generator = torch.Generator().manual_seed(seed_of(seed, name))
    values = torch.empty(shape)
    if init == "gaussian":
        return values.normal_(0.0, 1.0 / shape[0], generator=generator)
    bound = 1.0 / math.sqrt(shape[-1])
    return values.uniform_(-bound, bound, generator=generator)


def read_adapter(model: nn.Module, plan: AdapterPlan, directory: Path) -> None:
    """Fill the adapters that `model` has by `plan`. Call it under `torch.no_grad`, as it writes into parameters.

    Raises:
        IntegrityError: Files do not fit, values are not finite, or the adapter has another base.
    """
    with open_weight_files(directory, WEIGHTS_FILE) as checkpoint:
        path = directory / BASE_FILE
        if path.exists():  # PEFT itself writes no hash
            mend = ", or remove this file to start from the adapter on this base instead"
            check_base(path, read_base(path), base_of(model), mend)
        files, view = lazy_tensors(checkpoint.tensors), ModelView(model)
        tensors = view.adapters
        for name, lazy in model_tensors_from(files, plan.targets, plan.replaced, plan.parts, directory).items():
            for box, local in held_parts(tensors[name]):  # empty if on another pipeline stage
                read_box(lazy, box, local, checkpoint.read)
                refuse_non_finite(name, lazy, box, local)
        # PEFT writes a head's frozen weight beside its adapter, and loads it again.
        for key, name in base_copies(files, plan.targets).items():
            lazy, base = files[key], view.tensors.get(name)
            if base is None:
                raise not_in_base(directory, key, name)
            fits = tuple(lazy.shape) == tuple(base.shape)
            for box, local in held_parts(base) if fits and not is_on_other_stage(base) else ():
                fits = fits and torch.equal(read_values(lazy, checkpoint.read, box).to(local), local)
            if not fits:
                raise other_base(directory, f"{key} is not the weight of the model's")


def copy_adapter(model: nn.Module, plan: AdapterPlan, values: Mapping[str, torch.Tensor], where: Path) -> None:
    """Fill the adapters of a model in memory, not yet sharded, from PEFT's tensors. Call it under `torch.no_grad`.

    Args:
        values: By the keys of PEFT's file.
        where: Stands for the file's directory in messages.

    Raises:
        IntegrityError: Tensors do not fit.
    """
    files = lazy_tensors({key: StateTensor(key, tensor) for key, tensor in values.items()})

    def fetch(leaf: Any, box: Box, out: torch.Tensor) -> None:
        out.copy_(leaf.tensor[slices(box)])

    for name, lazy in model_tensors_from(files, plan.targets, plan.replaced, plan.parts, where).items():
        read_box(lazy, full_box(lazy.shape), local_tensor(model.get_parameter(name)), fetch)


def check_adapter(model: nn.Module) -> None:
    """Raise the error of `read_adapter` for files that do not fit the model's plan, from their header alone."""
    plan = sharded(model).lora_plan
    if plan is not None and plan.weights is not None:
        with open_weight_files(plan.weights, WEIGHTS_FILE) as checkpoint:
            files = lazy_tensors(checkpoint.tensors)
            model_tensors_from(files, plan.targets, plan.replaced, plan.parts, plan.weights)


@dataclass(frozen=True, slots=True)
class Base:
    """The frozen weights of a model with adapters."""

    sha256: str
    """`content_hash` of the frozen weights, in the dtypes that they have in training."""
    dtype: str
    """The dtype of most of them."""
    frozen: str | None = None
    """The format to which they were quantised for training; None if they were not."""

    def __str__(self) -> str:
        packed = "" if self.frozen is None else f", packed as {self.frozen}"
        return f"{self.sha256[:12]} in {self.dtype}{packed}"


def base_of(model: nn.Module) -> Base:
    base = sharded(model).lora_base
    assert isinstance(base, Base), "the adapters of this model were never started"
    return base


def base_bytes(model: nn.Module) -> bytes:
    """Return the content of the file that describes the base beside an adapter."""
    description = {key: value for key, value in asdict(base_of(model)).items() if value is not None}
    return json.dumps(description).encode() + b"\n"


def read_base(path: Path, content: bytes | None = None) -> Base:
    """Read the description that `base_bytes` made from `path`, or from its `content`. Raises `IntegrityError`."""
    try:
        base = Base(**parse_json(read_file(path) if content is None else content))
        if not isinstance(base.sha256, str) or base.frozen not in _FROZEN:
            raise TypeError("not text")
        if not isinstance(getattr(torch, base.dtype, None), torch.dtype):
            raise TypeError(f"{base.dtype} is no dtype")
    except (TypeError, ValueError) as error:
        raise IntegrityError(
            f"{path}: does not say which base the adapter belongs to ({error})", key="adapter.damaged"
        ) from error
    return base


def check_base(path: Path, saved: Base, here: Base, otherwise: str = "") -> None:
    """Raise `IntegrityError` if the base `here` is not the `saved` one of `path`.

    Args:
        otherwise: The end of the sentence, for another way to continue.
    """
    if saved != here:
        as_trained = "the model, the precision.compute and the precision.frozen it was trained with"
        raise other_base(path, f"its weights were {saved}, here they are {here}; use {as_trained}{otherwise}")


def check_scaling(path: Path, content: Mapping[str, Any], model: nn.Module, plan: AdapterPlan) -> None:
    """Raise `IntegrityError` if the adapter config at `path` scales an adapter of `model` in another way than `plan`.

    Ranks are compared with the shapes of tensors; nothing in a tensor tells its alpha.

    Args:
        content: The content of the config.
    """
    read = as_peft_reads(content, ModelView(model).full, path)
    named: list[tuple[Target, LoraConfig, list[str]]] = []
    for target in plan.targets:
        # A config that does not select what training started from by matrices of single experts names those.
        parts = () if config_selects(content, target) else plan.parts.get(target.name, ())
        names = [part.key.removeprefix(PREFIX) for part in parts] or [name_in_config(read, target)]
        named.append((target, lora_of(content if parts else read), names))
    refuse_slow_patterns(patterns_in(content), [name for _, _, names in named for name in names], path)
    for target, said, names in named:
        for scaling in {said.scaling_of(*said.of(name)) for name in names}:
            if not math.isclose(scaling, target.scaling):
                how = f"scales {target.name} by {scaling:g}, this model by {target.scaling:g}"
                raise differs(path, f"{how}; give the model its settings (r, lora_alpha, use_rslora, patterns)")


def other_base(path: Path, how: str) -> IntegrityError:
    """Return the error for the adapter at `path`. `how`: by what one sees it, and the cure."""
    return IntegrityError(f"{path}: the adapter was trained on another base: {how}", key="adapter.other-base")


@torch.no_grad()
def content_hash(model: nn.Module) -> str:
    """Return the hash of all parameters and persistent buffers except adapters, and a classifier's head, which trains.

    Collectives: every rank calls it. One all-reduce of one integer per tensor on the default group.
    """
    view = ModelView(model)
    heads = classifier_head(view)
    tensors = {name: tensor for name, tensor in view.unique.items() if name not in heads}
    sums = []
    for tensor in tensors.values():
        parts = held_parts(tensor) if owns_copy(tensor) else []
        # In int64, which wraps around as the sums over ranks do.
        sums.append(
            torch.tensor([element_sum(local, box, tensor.shape) for box, local in parts], dtype=torch.int64).sum()
        )
    joined = sum_over_ranks(torch.stack(sums))
    return joined_hash(tensors, dict(zip(tensors, joined.tolist(), strict=True)))


def element_sum(values: Tensor, box: Box, shape: torch.Size | tuple[int, ...]) -> int:
    """Return the weighted sum of the elements of `box` of a tensor of `shape`.

    Args:
        values: The elements of `box`, with its extents.

    Returns:
        The sum modulo 2**64, signed. The sums of disjoint boxes add up to the sum of the tensor.
    """
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for part in blocks(box, _HASHED_ELEMENTS):
        if any(size == 0 for size in extents(part)):
            continue
        bits = values_at(values, slices(part, box)).contiguous()
        bits = bits.view(_INTEGERS[bits.itemsize]).to(torch.int64)
        place = torch.zeros((), dtype=torch.int64, device=values.device)
        for (start, stop), size in zip(part, shape, strict=True):
            place = place.unsqueeze(-1) * size + torch.arange(start, stop, device=values.device)
        # Odd factors: a changed element always changes the sum.
        total += (bits * (2 * place + 1)).sum()
    return int(total)


def joined_hash(tensors: Mapping[str, Tensor], sums: Mapping[str, int]) -> str:
    """Return one hash of the sums of all tensors and of their names, dtypes and shapes."""
    content = [[name, str(t.dtype), list(t.shape), sums[name] % 2**64] for name, t in sorted(tensors.items())]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
