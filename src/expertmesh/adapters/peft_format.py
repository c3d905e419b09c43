"""PEFT's adapter files: what each tensor is called there, and how it lies there.

Routed experts are PEFT's `target_parameters`: A of all experts is one `[E * r, in]` matrix, expert after expert; B is
`[out, r * E]` with the expert index running fastest. Two parameters of one module are nested wrappers, the first of
them innermost. PEFT takes stored experts for `[out, in]` unless their module says that it is transposed; where that is
wrong, A and B change places in its file. Or each expert has matrices of its own, named as in the model's published
files (`Part`). PEFT renames what it reads as transformers renames published files (0.19 and later), so in a few
families a module has to have another name in the file than in memory, where PEFT itself would not find what it wrote.
Read and written through lazy tensors: nobody needs to know the sharding.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertmesh.adapters.targets import Target
from expertmesh.config.errors import IntegrityError
from expertmesh.state.model_view import ModelView
from expertmesh.weights.lazy import LazyTensor
from expertmesh.weights.mapping import StateTensor, plan_save

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
# Ours, beside PEFT's own: which base the adapter was trained on.
BASE_FILE = "expertmesh.json"
PREFIX = "base_model.model."
# What modules of routed experts and routers were called in transformers 4. In many families PEFT takes a module of such
# a name in `target_modules` for the fused experts or the router, and doubles r (its `_convert_peft_config_moe`).
TAKEN_FOR_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "gate")


@dataclass(frozen=True, slots=True)
class Part:
    """A matrix of the model's published files: which `expert` of an adapted weight it is, and which of its outputs. Its
    adapter's keys begin with `key`.
    """

    key: str
    expert: int | None
    rows: tuple[int, int]

    @property
    def keys(self) -> tuple[str, str]:
        """Of A and B."""
        return f"{self.key}.lora_A.weight", f"{self.key}.lora_B.weight"


def published_parts(model: PreTrainedModel, targets: Sequence[Target]) -> Iterator[tuple[Target, str, Part | None]]:
    """Tensors of the model's published files that hold adapted weights, by name; None for what is not one matrix."""
    adapted = {target.weight: target for target in targets}
    for key, lazy in plan_save(ModelView(model)).items():
        weights = [leaf.name for leaf in lazy.leaves() if leaf.name in adapted]
        if weights:
            yield adapted[weights[0]], key, _part_of(key, lazy, adapted[weights[0]])


def _part_of(key: str, lazy: LazyTensor, target: Target) -> Part | None:
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
    """The names of A and B of `target` in a file that PEFT reads; `targets` are all of the adapter, in module order."""
    return _keys(target.in_files or target.module, target, targets)


def peft_keys(target: Target, targets: Sequence[Target]) -> tuple[str, str]:
    """The same in PEFT's memory, and in the file that PEFT itself writes."""
    return _keys(target.module, target, targets)


def keys_in(names: Container[str], target: Target, targets: Sequence[Target]) -> tuple[str, str]:
    """Those of the two that a file with these `names` has; `file_keys` where it has neither."""
    theirs = peft_keys(target, targets)
    return theirs if theirs[0] in names else file_keys(target, targets)


def _keys(module: str, target: Target, targets: Sequence[Target]) -> tuple[str, str]:
    nested = [each for each in targets if each.module == target.module and each.parameter is not None]
    outside = len(nested) - 1 - nested.index(target) if target.parameter is not None else 0
    base = f"{PREFIX}{module}{'.base_layer' * outside}"
    return f"{base}.lora_A.weight", f"{base}.lora_B.weight"


def file_tensors(state: Mapping[str, Tensor], targets: Sequence[Target]) -> dict[str, LazyTensor]:
    """The tensors of PEFT's file, made of the model's: `state` holds the adapters by name, sharded or not."""
    files: dict[str, LazyTensor] = {}
    for target in targets:
        a, b = (LazyTensor.of(StateTensor(name, state[name])) for name in _names(target))
        key_a, key_b = file_keys(target, targets)
        if target.experts is not None:
            if target.swapped:
                a, b = _lazy(b.transpose(1, 2)), _lazy(a.transpose(1, 2))
            a, b = _lazy(a.flatten(0, 1)), _lazy(b.permute(1, 2, 0).flatten(1, 2))
        files[key_a], files[key_b] = a, b
    return files


def model_tensors_from(
    files: Mapping[str, LazyTensor], targets: Sequence[Target], parts: Mapping[str, Sequence[Part]], directory: Path
) -> dict[str, LazyTensor]:
    """The reverse: the model's adapters by name, made of PEFT's file. Raises `IntegrityError` for what does not fit,
    naming the file in `directory`. Leaves out `base_copies`. `parts`: those of a target, by its name, whose file names
    matrices of the published files.
    """
    path = directory / WEIGHTS_FILE
    tensors: dict[str, LazyTensor] = {}
    left = set(files) - set(base_copies(files, targets))
    for target in targets:
        if target.name in parts:
            tensors |= zip(_names(target), _joined(path, files, target, parts[target.name]), strict=True)
            left -= {key for part in parts[target.name] for key in part.keys}
            continue
        experts, r, sizes = target.experts or 1, target.r, (target.in_features, target.out_features)
        inner, out = reversed(sizes) if target.swapped else sizes
        shapes = ((experts * r, inner), (out, r * experts))
        keys = keys_in(files, target, targets)
        a, b = (stored(path, files, key, shape, target) for key, shape in zip(keys, shapes, strict=True))
        left -= set(keys)
        if target.experts is not None:
            a, b = _lazy(a.unflatten(0, (experts, r))), _lazy(b.unflatten(1, (r, experts)).permute(2, 0, 1))
            if target.swapped:
                a, b = _lazy(b.transpose(1, 2)), _lazy(a.transpose(1, 2))
        tensors |= zip(_names(target), (a, b), strict=True)
    if left:
        raise IntegrityError(
            f"{path}: holds {min(left)}, which fits no target of the adapter's config",
            key="adapter.differs-from-its-config",
        )
    return tensors


def _names(target: Target) -> list[str]:
    """Of A and B in the model."""
    return [f"{target.module}.{leaf}" for leaf in target.leaves]


def _joined(
    path: Path, files: Mapping[str, LazyTensor], target: Target, parts: Sequence[Part]
) -> tuple[LazyTensor, LazyTensor]:
    """A and B of a target made of its parts': gate and up, say, have a share of the rank each, as PEFT joins them."""
    of_experts: dict[int | None, list[Part]] = {}
    for part in sorted(parts, key=lambda part: (part.expert or 0, part.rows)):
        of_experts.setdefault(part.expert, []).append(part)
    joined = []
    for each in of_experts.values():
        r = target.r // len(each)
        shapes = [((r, target.in_features), (part.rows[1] - part.rows[0], r)) for part in each]
        pairs = [
            [stored(path, files, key, shape, target) for key, shape in zip(part.keys, of_part, strict=True)]
            for part, of_part in zip(each, shapes, strict=True)
        ]
        joined.append((torch.cat([a for a, _ in pairs]), torch.block_diag(*(b for _, b in pairs))))
    if target.experts is None:
        return _lazy(joined[0][0]), _lazy(joined[0][1])
    return _lazy(torch.stack([a for a, _ in joined])), _lazy(torch.stack([b for _, b in joined]))


def base_copies(files: Mapping[str, LazyTensor], targets: Sequence[Target]) -> dict[str, str]:
    """Keys of base weights that PEFT put into its file beside a head's adapter, and whose they are in the model."""
    linear = [target.module for target in targets if target.parameter is None]
    copies = {
        f"{PREFIX}{module}.base_layer.{leaf}": f"{module}.{leaf}" for module in linear for leaf in ("weight", "bias")
    }
    return {key: name for key, name in copies.items() if key in files}


def stored(path: Path, files: Mapping[str, LazyTensor], key: str, shape: tuple[int, ...], target: Target) -> LazyTensor:
    """The tensor of this name and shape, or `IntegrityError`."""
    if key not in files:
        raise IntegrityError(
            f"{path}: has no {key}, although the adapter's config targets {target.name}",
            key="adapter.differs-from-its-config",
        )
    if tuple(files[key].shape) != shape:
        raise IntegrityError(
            f"{path}: {key} is {list(files[key].shape)}, not {list(shape)}", key="adapter.differs-from-its-config"
        )
    if not files[key].dtype.is_floating_point:
        raise IntegrityError(f"{path}: {key} is {files[key].dtype}, not numbers", key="adapter.differs-from-its-config")
    return files[key]


def is_parameter(target: Target) -> bool:
    """Whether the config names the target's weight rather than its module.

    Named as parameters, modules that PEFT would take for others (`TAKEN_FOR_EXPERTS`) are left what they are, with the
    same keys in the file.
    """
    return target.parameter is not None or target.ending in TAKEN_FOR_EXPERTS


def name_of(target: Target) -> str:
    """What the config calls the target."""
    return target.weight if is_parameter(target) else target.module


def _lazy(tensor: Tensor) -> LazyTensor:
    assert isinstance(tensor, LazyTensor)
    return tensor
