"""Fills an already sharded model from a Hugging Face directory: each rank reads only the bytes of its shards.

Tensors are read one by one, in the order of the files, while the system already reads the next ones: the ranks of a
node sweep over the same file together. They go straight into the local shards on their device, cast to the parameter's
dtype. Beside the shards a rank holds at most one block of one tensor in host memory. Errors are raised on every rank
with the same sentence. Weights are never gathered or broadcast, so that no rank can overwrite another's experts.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from expertmesh.anatomy import describe
from expertmesh.config.errors import IntegrityError
from expertmesh.distributed.all_ranks import raise_on_all_ranks
from expertmesh.io.boxes import Box, intersect, slices
from expertmesh.io.safetensors_reader import FileTensor, WeightFiles, open_weight_files
from expertmesh.io.terminal import tracked
from expertmesh.state.packed import PackedTensor
from expertmesh.state.shards import local_box, local_tensor
from expertmesh.weights.mapping import FILE_LEAVES, LoadPlan, model_tensors, plan_load
from expertmesh.weights.meta_model import materialize
from expertmesh.weights.reading import bytes_needed, read_box
from expertmesh.weights.source import UnmappedTensors, remember_files, summarize_unmapped

if TYPE_CHECKING:
    from expertmesh.weights.lazy import LazyTensor

_CHECKED_ELEMENTS = 1 << 22
# How much the system is told to read before it is asked for.
_AHEAD_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What this rank did. Bytes are of tensor data; `local_bytes` those of its shards in the model's dtypes.

    `experts` are (experts module, first, last + 1): the experts of each layer that this rank holds a part
    of. `ignored` are the file tensors that the model's family declares unused, `unmapped` a summary of them;
    `save_model` copies them from these files. `new` are tensors that the files lack and that may be new.
    """

    tensors: int
    bytes_read: int
    file_bytes: int
    local_bytes: int
    experts: tuple[tuple[str, int, int], ...]
    ignored: tuple[str, ...]
    unmapped: tuple[UnmappedTensors, ...]
    new: tuple[str, ...] = ()


def fill(
    model: PreTrainedModel,
    directory: str | Path,
    allocate_on: torch.device | str | None = None,
    new: Sequence[str] = (),
) -> LoadReport:
    """Give each parameter and persistent buffer of `model` its value from the safetensors of `directory`.

    `model` may be plain or parallelised (FSDP2, expert-parallel DTensors); its local shards have to be allocated, or
    are allocated on the device `allocate_on`, once the files' headers fit the model. Every rank calls it. Tied tensors
    are read once. The model remembers the layout and dtypes of the files and the unmapped tensors, so that saving
    restores them. Of `new` tensors those that the files lack keep what is in memory.
    Raises on all ranks alike: `InputError`, `SecurityError`, `IntegrityError` (see `open_weight_files`
    and `plan_load`), the last also for values that are not finite. Issues one small all-reduce on the default group.
    """
    with raise_on_all_ranks("loading weights"), open_weight_files(directory, weights_file(model)) as files:
        plan = plan_load(model, files, new)
        if allocate_on is not None:
            materialize(model, allocate_on)
        report = fill_planned(model, files, plan)
    return replace(report, new=tuple(name for name in new if name not in plan.tensors))


def read_whole(model: PreTrainedModel, directory: str | Path) -> None:
    """`fill` for one process by itself, with a model on meta that is not sharded. No communication."""
    with open_weight_files(directory, weights_file(model)) as files:
        plan = plan_load(model, files)
        materialize(model, "cpu")
        fill_planned(model, files, plan)


def bytes_to_read(model: PreTrainedModel, directory: str | Path) -> int:
    """How many bytes of tensor data `fill` will read on this rank, from headers; `model` may be on meta.

    Raises what `fill` raises before it reads a weight; issues no collective, so call it on every rank or
    inside `raise_on_all_ranks`.
    """
    state = model_tensors(model)
    with open_weight_files(directory, weights_file(model)) as files:
        plan = plan_load(model, files)
    sources = [*plan.tensors.items(), *plan.copies]
    return sum(bytes_needed(lazy, local_box(state[name])) for name, lazy in sources)


@torch.no_grad()
def fill_planned(model: PreTrainedModel, files: WeightFiles, plan: LoadPlan) -> LoadReport:
    """Carry out `plan` on this rank. Raises `IntegrityError`; issues no collective."""
    state = model_tensors(model)
    announced = _announced(files, plan, state)
    for name, lazy in tracked(announced, len(plan.tensors), "loading weights", "tensors"):
        box, local = local_box(state[name]), local_tensor(state[name])
        assert not local.is_meta, f"{name} is still on meta; allocate the model's shards before filling them"
        read_box(lazy, box, local, files.read)
        refuse_non_finite(name, lazy, box, local)
    for name, lazy in plan.copies:
        box, local = local_box(state[name]), local_tensor(state[name])
        copy = torch.empty_like(local)
        read_box(lazy, box, copy, files.read)
        if not torch.equal(copy, local):
            raise differing_copies(lazy, plan.tensors[name])
    source = remember_files(model, plan, files)
    return LoadReport(
        tensors=len(plan.tensors),
        bytes_read=files.bytes_read,
        file_bytes=files.total_bytes,
        local_bytes=sum(local_tensor(state[name]).nbytes for name in plan.tensors),
        experts=_experts_held(model, state),
        ignored=plan.ignored,
        unmapped=summarize_unmapped(source.unmapped, files.tensors.keys() - set(plan.ignored)),
    )


def _announced(files: WeightFiles, plan: LoadPlan, state: dict[str, Tensor]) -> Iterator[tuple[str, "LazyTensor"]]:
    """The tensors in the order of the files, each after the system has been told what of the next ones will be read."""
    items = sorted(plan.tensors.items(), key=lambda item: _place(item[1]))
    boxes = [local_box(state[name]) for name, _ in items]
    sizes = [bytes_needed(lazy, box) for (_, lazy), box in zip(items, boxes, strict=True)]
    told, following = 0, 0 if hasattr(os, "posix_fadvise") else len(items)
    for number, item in enumerate(items):
        while following < len(items) and (following <= number or told < _AHEAD_BYTES):
            for piece in items[following][1].pieces:
                common = intersect(piece.dest, boxes[following])
                if isinstance(piece.leaf, FileTensor) and common is not None:
                    files.announce(piece.leaf, piece.crop(common).source)
            told += sizes[following]
            following += 1
        yield item
        told -= sizes[number]


def _place(lazy: "LazyTensor") -> tuple[str, int]:
    """The file and the offset where the first of its bytes are."""
    leaves = (leaf for leaf in lazy.leaves() if isinstance(leaf, FILE_LEAVES))
    return min(((leaf.path.name, getattr(leaf, "offset", 0)) for leaf in leaves), default=("", 0))


def refuse_non_finite(name: str, lazy: "LazyTensor", box: Box, local: Tensor) -> None:
    if not local.is_floating_point() or local.numel() == 0:
        return
    if isinstance(local, PackedTensor):
        if (expert := local.not_finite()) is not None:
            index = [box[0][0] + expert, *(start for start, _ in box[1:])]
            raise IntegrityError(
                f"{named_source(lazy, index)}: expert {index[0]} of {name} holds a value that is not finite; the "
                "checkpoint is damaged",
                key="weights.not-finite",
            )
        return
    # A sum is finite only if every term is: one pass, one wait for the device. If a sum overflows, the loop decides.
    wide = torch.promote_types(local.dtype, torch.float32)
    parts = torch.split(local.reshape(-1), _CHECKED_ELEMENTS)
    if bool(torch.stack([part.sum(dtype=wide) for part in parts]).sum().isfinite()):
        return
    for number, part in enumerate(parts):
        if bool(part.isfinite().all()):
            continue
        first = number * _CHECKED_ELEMENTS + int(part.isfinite().logical_not().nonzero()[0])
        offsets = torch.unravel_index(torch.tensor(first), local.shape)
        index = [int(offset) + start for offset, (start, _) in zip(offsets, box, strict=True)]
        raise IntegrityError(
            f"{named_source(lazy, index)} holds a value that is not finite in {local.dtype} "
            f"(parameter {name} at {index}); the checkpoint is damaged or needs a wider dtype",
            key="weights.not-finite",
        )


def differing_copies(lazy: "LazyTensor", other: "LazyTensor") -> IntegrityError:
    """What to raise when files hold two versions of what is one tensor in the model."""
    return IntegrityError(
        f"{named_source(lazy)} differs from {named_source(other)}, but the config ties them; "
        "set tie_word_embeddings to false in config.json if they are meant to differ",
        key="weights.tied-copies-differ",
    )


def named_source(lazy: "LazyTensor", index: list[int] | None = None) -> str:
    """The file tensor behind one element of `lazy`, or behind its first, with its file."""
    index = index or [start for start, _ in lazy.pieces[0].dest]
    for piece in lazy.pieces:
        if all(start <= at < stop for at, (start, stop) in zip(index, piece.dest, strict=True)):
            leaf = piece.leaf
            return f"{leaf.path}: tensor {leaf.name}" if isinstance(leaf, FILE_LEAVES) else leaf.name
    raise AssertionError(f"no piece of {lazy!r} holds {index}")


def head_names(model: PreTrainedModel) -> list[str]:
    """The tensors of a sequence classifier beside its base model, which files of a language model do not hold."""
    return [name for name in model_tensors(model) if not name.startswith(f"{model.base_model_prefix}.")]


@torch.no_grad()
def start_head(model: PreTrainedModel, names: Sequence[str], seed: int) -> None:
    """Give the tensors `names` of the head, which are allocated, the values that `from_pretrained` would draw first
    after `torch.manual_seed(seed)`. No communication.
    """
    for module in dict.fromkeys(name.rpartition(".")[0] for name in names):
        head = model.get_submodule(module)
        assert isinstance(head, nn.Linear), f"{module} is no linear layer"
        new = nn.Linear(head.in_features, head.out_features, bias=head.bias is not None)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model._init_weights(new)
        for leaf, values in new.named_parameters():
            whole = head.get_parameter(leaf)
            local_tensor(whole).copy_(values[slices(local_box(whole))])


def weights_file(model: PreTrainedModel) -> str | None:
    """The name that a config may give its weights file instead of the usual one."""
    name: str | None = getattr(model.config, "transformers_weights", None)
    return name


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """Parameters of one experts module that hold equal shares of dim 0 for each of `count` experts."""

    module: str
    count: int
    names: tuple[str, ...]

    def rows(self, tensor: Tensor, number: int) -> tuple[int, int]:
        """Where expert `number` is on dim 0 of `tensor`: one index, or several where experts are flattened."""
        share = tensor.shape[0] // self.count
        return number * share, (number + 1) * share

    def experts(self, tensor: Tensor, rows: tuple[int, int]) -> range:
        """Which experts have a part in `rows` of dim 0."""
        share = tensor.shape[0] // self.count
        return range(rows[0] // share, -(-rows[1] // share))


def expert_tensors(model: PreTrainedModel) -> list[ExpertTensors]:
    """Of each experts module, in the order of the anatomy; parameters are named as in the model's state dict."""
    return [
        ExpertTensors(spec.name, spec.num_experts, tuple(f"{spec.name}.{name}" for name in spec.parameters))
        for spec in describe(model).experts
    ]


def _experts_held(model: PreTrainedModel, state: dict[str, Tensor]) -> tuple[tuple[str, int, int], ...]:
    firsts = [(tensors, state[tensors.names[0]]) for tensors in expert_tensors(model)]
    held = [(tensors.module, tensors.experts(first, local_box(first)[0])) for tensors, first in firsts]
    return tuple((module, experts.start, experts.stop) for module, experts in held)
