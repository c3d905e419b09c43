"""Map between a model's adapters and the tensors of PEFT's adapter files: their names, shapes and memory layout.

Routed experts are PEFT's `target_parameters`: A of all experts is one `[E * r, in]` matrix, expert after expert; B is
`[out, r * E]` with the expert index running fastest. Two parameters of one module are nested wrappers, the first of
them innermost. PEFT takes stored experts for `[out, in]` unless their module has `is_transposed`; if that is wrong, A
and B are exchanged in its file. Other files have matrices for each expert, named as in the model's published files
(`Part`). PEFT (0.19 and later) renames keys that it reads as transformers renames published files; so in a few families
a module needs another name in the file than in memory, or PEFT would not find it. All through lazy tensors, so that
nothing here depends on the sharding.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertmesh.adapters.targets import EMBEDDING, Replaced, Target, new_values_of
from expertmesh.config.errors import IntegrityError
from expertmesh.state.model_view import ModelView
from expertmesh.weights.lazy import LazyTensor, as_lazy
from expertmesh.weights.mapping import StateTensor, plan_save

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
# A file of ours beside PEFT's: the base on which the adapter was trained.
BASE_FILE = "expertmesh.json"
PREFIX = "base_model.model."
# The names of modules of routed experts and routers in transformers 4. In many families PEFT takes such a name in
# `target_modules` for the fused experts or the router, and doubles r (its `_convert_peft_config_moe`).
TAKEN_FOR_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "gate")


@dataclass(frozen=True, slots=True)
class Part:
    """A matrix of the model's published files that is a part of an adapted weight."""

    key: str
    """The prefix of its adapter's keys."""
    expert: int | None
    """The index of the expert in the adapted weight; None if that has no experts."""
    rows: tuple[int, int]
    """The range of the adapted weight's outputs."""

    @property
    def keys(self) -> tuple[str, str]:
        """The keys of A and B."""
        return f"{self.key}.lora_A.weight", f"{self.key}.lora_B.weight"


def published_parts(model: PreTrainedModel, targets: Sequence[Target]) -> Iterator[tuple[Target, str, Part | None]]:
    """Yield (target, name, part) of the tensors of the model's published files that hold adapted weights.

    The part is None for a tensor that is not one matrix with all inputs.
    """
    adapted = {target.weight: target for target in targets}
    for key, lazy in plan_save(ModelView(model)).items():
        weights = [leaf.name for leaf in lazy.leaves() if leaf.name in adapted]
        if weights:
            yield adapted[weights[0]], key, _part_of(key, lazy, adapted[weights[0]])


def _part_of(key: str, lazy: LazyTensor, target: Target) -> Part | None:
    """Return the part of `target` that a published tensor is; None unless it is one matrix with all of its inputs."""
    if len(lazy.pieces) != 1 or lazy.dim() != 2 or not key.endswith(".weight"):
        return None
    (piece,) = lazy.pieces
    lead = 0 if target.experts is None else 1
    out, inner = (lead + 1, lead) if target.transposed and lead else (lead, lead + 1)
    if not isinstance(piece.leaf, StateTensor) or piece.dims != (out, inner):
        return None
    if piece.source[inner] != (0, target.in_features):
        return None
    return Part(f"{PREFIX}{key.removesuffix('.weight')}", piece.source[0][0] if lead else None, piece.source[out])


def file_keys(target: Target, targets: Sequence[Target]) -> tuple[str, str]:
    """Return the names of A and B of `target` in a file that PEFT reads.

    Args:
        targets: All targets of the adapter, in module order.
    """
    return _keys(target.in_files or target.module, target, targets)


def peft_keys(target: Target, targets: Sequence[Target]) -> tuple[str, str]:
    """Return the names of A and B in PEFT's memory, and in a file that PEFT itself writes."""
    return _keys(target.module, target, targets)


def keys_in(names: Container[str], target: Target, targets: Sequence[Target]) -> tuple[str, str]:
    """Return `peft_keys` if a file with these `names` has them, otherwise `file_keys`."""
    theirs = peft_keys(target, targets)
    return theirs if theirs[0] in names else file_keys(target, targets)


def _keys(module: str, target: Target, targets: Sequence[Target]) -> tuple[str, str]:
    """Return the keys of A and B for a module name; each inner wrapper of one module adds `base_layer`."""
    nested = [each for each in targets if each.module == target.module and each.parameter is not None]
    outside = len(nested) - 1 - nested.index(target) if target.parameter is not None else 0
    base = f"{PREFIX}{module}{'.base_layer' * outside}"
    if target.group == EMBEDDING:
        return f"{base}.lora_embedding_A", f"{base}.lora_embedding_B"
    return f"{base}.lora_A.weight", f"{base}.lora_B.weight"


def replaced_key(names: Container[str], weight: str, each: Replaced) -> str:
    """Return the key of `each` in a file with these `names`, as `keys_in` does where it is added to a bias."""
    theirs = f"{PREFIX}{weight.removesuffix('.bias')}.lora_B.bias"
    return theirs if each.scaling is not None and theirs in names else each.key


def file_tensors(
    state: Mapping[str, Tensor], targets: Sequence[Target], replaced: Mapping[str, Replaced]
) -> dict[str, LazyTensor]:
    """Make the tensors of PEFT's file from the model's.

    Args:
        state: The adapters by name, sharded or not.
    """
    files: dict[str, LazyTensor] = {}
    for target in targets:
        a, b = (LazyTensor.of(StateTensor(name, state[name])) for name in target.factors)
        key_a, key_b = file_keys(target, targets)
        if target.experts is not None:
            if target.swapped:
                a, b = as_lazy(b.transpose(1, 2)), as_lazy(a.transpose(1, 2))
            a, b = as_lazy(a.flatten(0, 1)), as_lazy(b.permute(1, 2, 0).flatten(1, 2))
        files[key_a], files[key_b] = a, b
    return files | new_values(state, replaced)


def new_values(state: Mapping[str, Tensor], replaced: Mapping[str, Replaced]) -> dict[str, LazyTensor]:
    """Make the tensors of PEFT's file for what trains whole, as `file_tensors`."""
    names = {each.key: new_values_of(weight) for weight, each in replaced.items()}
    return {key: LazyTensor.of(StateTensor(name, state[name])) for key, name in names.items()}


def model_tensors_from(
    files: Mapping[str, LazyTensor],
    targets: Sequence[Target],
    replaced: Mapping[str, Replaced],
    parts: Mapping[str, Sequence[Part]],
    directory: Path,
) -> dict[str, LazyTensor]:
    """Make the model's adapters, by name, from the tensors of PEFT's file, without `base_copies`.

    Args:
        files: The tensors of the file by key.
        parts: By target name, the parts of a target whose adapters the file may name after matrices of the published
            files.
        directory: For messages.

    Raises:
        IntegrityError: A tensor is missing, does not fit, or belongs to no target; names the file.
    """
    path = directory / WEIGHTS_FILE
    tensors: dict[str, LazyTensor] = {}
    left = set(files) - set(base_copies(files, targets))
    for weight, each in replaced.items():
        key = replaced_key(files, weight, each)
        tensors[new_values_of(weight)] = stored(path, files, key, each.shape, weight)
        left -= {key}
    for target in targets:
        keys = keys_in(files, target, targets)
        if target.name in parts and keys[0] not in files:  # saving again names it as PEFT does
            tensors |= zip(target.factors, _joined(path, files, target, parts[target.name]), strict=True)
            left -= {key for part in parts[target.name] for key in part.keys}
            continue
        experts, r, sizes = target.experts or 1, target.r, (target.in_features, target.out_features)
        inner, out = reversed(sizes) if target.swapped else sizes
        shapes = ((experts * r, inner), (out, r * experts))
        a, b = (stored(path, files, key, shape, target.name) for key, shape in zip(keys, shapes, strict=True))
        left -= set(keys)
        if target.experts is not None:
            a, b = as_lazy(a.unflatten(0, (experts, r))), as_lazy(b.unflatten(1, (r, experts)).permute(2, 0, 1))
            if target.swapped:
                a, b = as_lazy(b.transpose(1, 2)), as_lazy(a.transpose(1, 2))
        tensors |= zip(target.factors, (a, b), strict=True)
    if left:
        raise differs(path, f"holds {min(left)}, which fits no target of the adapter's config")
    return tensors


def _joined(
    path: Path, files: Mapping[str, LazyTensor], target: Target, parts: Sequence[Part]
) -> tuple[LazyTensor, LazyTensor]:
    """Join A and B of a target from those of its parts, as PEFT does: gate and up, for example, each get a share of r.

    A is the parts' A one below the other; B is block-diagonal.
    """
    of_experts: dict[int | None, list[Part]] = {}
    for part in sorted(parts, key=lambda part: (part.expert or 0, part.rows)):
        of_experts.setdefault(part.expert, []).append(part)
    joined = []
    for each in of_experts.values():
        r = target.r // len(each)
        shapes = [((r, target.in_features), (part.rows[1] - part.rows[0], r)) for part in each]
        pairs = [
            [stored(path, files, key, shape, target.name) for key, shape in zip(part.keys, of_part, strict=True)]
            for part, of_part in zip(each, shapes, strict=True)
        ]
        joined.append((torch.cat([a for a, _ in pairs]), torch.block_diag(*(b for _, b in pairs))))
    if target.experts is None:
        return as_lazy(joined[0][0]), as_lazy(joined[0][1])
    return as_lazy(torch.stack([a for a, _ in joined])), as_lazy(torch.stack([b for _, b in joined]))


def base_copies(files: Mapping[str, LazyTensor], targets: Sequence[Target]) -> dict[str, str]:
    """Return the keys of base weights that PEFT wrote beside an adapter of a head or an embedding.

    Each with its name in the model.
    """
    linear = [target.module for target in targets if target.parameter is None]
    copies = {
        f"{PREFIX}{module}.base_layer.{leaf}": f"{module}.{leaf}" for module in linear for leaf in ("weight", "bias")
    }
    return {key: name for key, name in copies.items() if key in files}


def stored(path: Path, files: Mapping[str, LazyTensor], key: str, shape: tuple[int, ...], name: str) -> LazyTensor:
    """Return the tensor `key`, of this shape and a floating-point dtype. Raises `IntegrityError` if there is none."""
    if key not in files:
        raise differs(path, f"has no {key}, although the adapter's config names {name}")
    if tuple(files[key].shape) != shape:
        raise differs(path, f"{key} is {list(files[key].shape)}, not {list(shape)}")
    if not files[key].dtype.is_floating_point:
        raise differs(path, f"{key} is {files[key].dtype}, not numbers")
    return files[key]


def differs(path: Path, how: str) -> IntegrityError:
    """Return the error for weights that are not those of the targets in the adapter's config."""
    return IntegrityError(f"{path}: {how}", key="adapter.differs-from-its-config")


def not_in_base(directory: Path, key: str, name: str) -> IntegrityError:
    """Return the error for one of `base_copies` of which the model has nothing."""
    return differs(directory / WEIGHTS_FILE, f"holds {key}, but the model has no {name}; give the base of this adapter")


def is_parameter(target: Target) -> bool:
    """Return whether the config names the target's weight instead of its module.

    It does for a parameter, and for a linear module that PEFT would otherwise take for experts (`TAKEN_FOR_EXPERTS`):
    PEFT does not reinterpret a parameter's name, and the keys in the file are the same.
    """
    return target.parameter is not None or target.ending in TAKEN_FOR_EXPERTS


def name_of(target: Target) -> str:
    """Return the target's name in the config."""
    return target.weight if is_parameter(target) else target.module
