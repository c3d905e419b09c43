"""Write the files of a model anew: merged with an adapter, or in another dtype. One process, no GPU.

For `expertmesh merge` and `expertmesh convert`. The base streams by in blocks, so that it may be larger than memory;
what is written has the base's own names, layout and further files. Nothing here runs the model or communicates.

1. The base is built on meta, its files are opened, and `plan_load` says which file tensors make which tensor.
2. A merge compares the base with the one that the adapter was trained on, by the hash that the adapter names
   (adapters/start.py).
3. `save_values` reads one box after the other from `FileValues`; `Deltas` adds `scaling · B A` to it, expert by expert,
   or replaces rows. In memory are A and B of the two adapted weights that were used last.
4. Samples of the result are compared by another way than they were computed: read through the safetensors library,
   multiplied in fp64, with the adapter taken apart as PEFT's own code does it.
"""

import hashlib
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from expertmesh.adapters.peft_config import CLASSIFIES, read_config
from expertmesh.adapters.peft_format import (
    BASE_FILE,
    CONFIG_FILE,
    PREFIX,
    WEIGHTS_FILE,
    Part,
    base_copies,
    differs,
    keys_in,
    model_tensors_from,
    not_in_base,
    replaced_key,
)
from expertmesh.adapters.plan import AdapterPlan, plan_adapters
from expertmesh.adapters.save import add_delta, replace_values
from expertmesh.adapters.start import Base, element_sum, joined_hash, other_base, read_base
from expertmesh.adapters.targets import Replaced, Target, new_values_of
from expertmesh.anatomy import describe, is_classifier
from expertmesh.config import LoraConfig, ModelConfig
from expertmesh.config.errors import InputError, IntegrityError
from expertmesh.data import load_tokenizer, padding_token_id
from expertmesh.io.boxes import Box, blocks, extents, full_box
from expertmesh.io.directory import check_target
from expertmesh.io.safetensors_reader import INDEX_FILE, WeightFiles, open_weight_files
from expertmesh.parallel.shard_plan import quantised_formats
from expertmesh.state.model_view import ModelView, attach
from expertmesh.weights.audit import LibraryFiles
from expertmesh.weights.lazy import LazyTensor, Rounded, lazy_tensors, read_box, read_values
from expertmesh.weights.load import differing_copies, first_not_finite, named_source, not_finite, remember_files
from expertmesh.weights.mapping import FILE_LEAVES, LoadPlan, StateTensor, classifier_head, plan_load, rounded_plan
from expertmesh.weights.meta_model import (
    DATA_FILES,
    GENERATION_FILE,
    build_meta_model,
    give_dtypes,
    labels_of,
    read_generation_config,
    read_model_config,
)
from expertmesh.weights.quantised.published import method_of, quantisation
from expertmesh.weights.save import SavedDtype, SaveReport, save_values
from expertmesh.weights.sidecars import TOKENIZER_FILES, CopiedFiles, matching_paths

_DTYPES = ("auto", "bfloat16", "float16", "float32", "as_loaded")
# The last is ModelOpt's, which says again what config.json says of codes; readers take it where that says nothing.
_NOT_COPIED = {"config.json", INDEX_FILE, CONFIG_FILE, BASE_FILE, "hf_quant_config.json"}
_MORE_TEMPLATES = "additional_chat_templates/*.jinja"
_BLOCK_ELEMENTS = 1 << 22
_SAMPLE_ELEMENTS = 1 << 18
_HALF_A_CODE = 0.2
# Every format's blocks divide it.
_LARGEST_BLOCK = 128
# Of products and sums in fp32, against those in fp64.
_FP32_ERROR = 2.0**-20


@dataclass(frozen=True, slots=True)
class Compared:
    """The comparison of merged weights with their files."""

    matrices: int
    """Number of matrices compared."""
    experts: int
    """Number of them that are one expert's."""
    worst: float
    """The largest difference, as a share of what rounding allows."""
    left: float | None = None
    """Share of the adapter's change, along that change, that rounding to codes has left; None if nothing was written as
    codes."""


@dataclass(frozen=True, slots=True)
class MergeReport:
    """An adapter that was merged into its base."""

    plan: AdapterPlan
    base: Path
    """Directory of the base."""
    base_checked: bool
    """True if the adapter names a hash of its base's weights, which these have."""
    frozen: str | None
    """The format that the experts were quantised to for training, and are merged in; None without."""
    saved: SaveReport
    unused: dict[str, tuple[int, ...]]
    """Experts of an adapted weight whose B is all zero, by the weight's name: nothing was added to them."""
    compared: Compared
    seconds: float


@torch.no_grad()
def merge(
    adapter: Path,
    target: Path,
    *,
    base: str | None = None,
    dtype: SavedDtype = "auto",
    max_shard_bytes: int = 5_000_000_000,
    trust_remote_code: bool = False,
) -> MergeReport:
    """Write base + adapter to `target`, which must not exist or be empty. No communication.

    Args:
        adapter: A directory of PEFT.
        base: A hub id or directory; None for what the adapter's config names.
        dtype: That of `save_model`. "auto" takes those of the base's files, bfloat16 where they are quantised;
            "as_loaded" the codes of a quantised base.

    Raises, with nothing left behind:
        InputError: What cannot be merged, no such base, target not empty, disk full.
        SecurityError: Pickles.
        IntegrityError: Damaged, keys missing, another base than the adapter was trained on, values that `dtype` cannot
            hold.
    """
    started = time.monotonic()
    if isinstance(dtype, str) and dtype not in _DTYPES:
        raise InputError(
            f"merge: {dtype!r} is none of {', '.join(_DTYPES)}; convert a plain result", key="config.wrong-value"
        )
    check_target(target)
    model, directory = _base_model(adapter, base, trust_remote_code)
    plan = plan_adapters(model, LoraConfig(from_adapter=str(adapter)), str(directory), merging=True)
    view = ModelView(model)
    with open_weight_files(directory, view.weights_file) as files, open_weight_files(adapter, WEIGHTS_FILE) as factors:
        load = plan_load(view, files)
        deltas = Deltas(plan, factors)
        check_copies(load, files)
        check_adapter_copies(plan.targets, factors, load, files)
        take_layout(view, load, files)
        trained_on = read_base(adapter / BASE_FILE) if (adapter / BASE_FILE).exists() else None
        if trained_on is not None:
            if trained_on.frozen is not None:  # the adapter was trained on experts that are rounded to this format
                attach(model, frozen_formats=quantised_formats(model, describe(model), trained_on.frozen))
            load = rounded_plan(model, load)
            _check_base(adapter / BASE_FILE, trained_on, model, load, files, trust_remote_code)
        saved = save_values(
            view,
            target,
            FileValues(view.unique, load, files, deltas),
            tokenizer=sidecar_files(directory, adapter, trust_remote_code),
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
        )
        try:
            compared = compare_sample(model, load, deltas, factors, saved.directory)
        except BaseException:
            shutil.rmtree(saved.directory.resolve(), ignore_errors=True)  # nothing that was not compared stays
            raise
    checked, frozen = trained_on is not None, None if trained_on is None else trained_on.frozen
    return MergeReport(plan, directory, checked, frozen, saved, deltas.unused, compared, time.monotonic() - started)


def _base_model(adapter: Path, base: str | None, trust_remote_code: bool) -> tuple[PreTrainedModel, Path]:
    """Return the base of an adapter with weights, on meta, and its directory."""
    content = read_config(adapter)
    if not (adapter / WEIGHTS_FILE).exists():
        raise InputError(f"{adapter}: has no {WEIGHTS_FILE}", key="adapter.no-weights")
    named = content.get("base_model_name_or_path")
    if base is None and not (isinstance(named, str) and named):
        raise InputError(
            f"{adapter / CONFIG_FILE}: does not say what the base is; give it with --base", key="adapter.unknown-base"
        )
    try:
        config, directory = read_model_config(
            base or str(named),
            revision=content.get("revision") if base is None else None,
            trust_remote_code=trust_remote_code,
        )
    except InputError as error:
        if base is not None:
            raise
        raise InputError(
            f"{error} (the base that {adapter / CONFIG_FILE} names; --base names another)", key=error.key
        ) from error
    labels = _labels(adapter) if content.get("task_type") == CLASSIFIES else None
    model = build_meta_model(
        config, torch.float32, directory=directory, trust_remote_code=trust_remote_code, num_labels=labels
    )
    if labels is not None:
        _read_where_padded(model, adapter, directory)
    read_generation_config(model, adapter / GENERATION_FILE)  # where answers end is what the adapter was taught
    return model, directory


def _labels(adapter: Path) -> int:
    """Return how many labels the head has that a classifier's adapter holds."""
    with open_weight_files(adapter, WEIGHTS_FILE) as files:
        head = files.tensors.get(f"{PREFIX}score.weight")
    if head is None:
        raise differs(adapter / WEIGHTS_FILE, "has no head, although the adapter is a classifier's")
    return int(head.shape[0])


def _read_where_padded(model: PreTrainedModel, *places: Path) -> None:
    """Let a classifier take the padding of the first tokenizer in `places` for padding, as its training did."""
    config: Any = model.config.get_text_config()
    for place in places:
        if (place / "tokenizer_config.json").exists():
            tokenizer = load_tokenizer(ModelConfig(name_or_path=str(place)))
            config.pad_token_id = padding_token_id(tokenizer, config.vocab_size)
            return


def _check_base(
    path: Path, trained_on: Base, model: PreTrainedModel, load: LoadPlan, files: WeightFiles, trust_remote_code: bool
) -> None:
    """Raise `IntegrityError` unless the weights that `load` plans from `files` are those that `path` names."""
    dtype = getattr(torch, trained_on.dtype)
    labels = model.config.num_labels if is_classifier(model) else None
    as_trained = build_meta_model(model.config, dtype, trust_remote_code=trust_remote_code, num_labels=labels)
    view = ModelView(as_trained)
    heads = classifier_head(view)
    tensors, sums = {name: tensor for name, tensor in view.unique.items() if name not in heads}, {}
    for name, tensor in tensors.items():  # as `content_hash` of a model that is filled from `files`
        parts = _read_in_blocks(load.tensors[name], files, tensor.dtype)
        sums[name] = sum(element_sum(values, part, tensor.shape) for part, values in parts)
    here = joined_hash(tensors, sums)
    if here != trained_on.sha256:
        how = f"its weights were {trained_on}, those of {files.directory} are {here[:12]}"
        raise other_base(path, f"{how}; give --base the one it was trained on")


def take_layout(view: ModelView, load: LoadPlan, files: WeightFiles) -> None:
    """Let a model be saved in the layout of its files, in their dtypes, with what they hold beside it."""
    give_dtypes(view.unique, {name: lazy.dtype for name, lazy in load.tensors.items()})
    remember_files(view, load, files)


def sidecar_files(base: Path, adapter: Path, code: bool) -> CopiedFiles:
    """Return the files that belong beside the weights: the base's small files, the tokenizer of the adapter's training.

    Args:
        code: Copy Python files too.
    """
    patterns = [pattern for pattern in DATA_FILES if pattern != "*.safetensors"] + ["*.py"] * code
    found = {path.name: path for pattern in patterns for path in base.glob(pattern)}
    files = {name: path for name, path in found.items() if name not in _NOT_COPIED and not name.endswith(".index.json")}
    return CopiedFiles(files | matching_paths(base, [_MORE_TEMPLATES]) | matching_paths(adapter, TOKENIZER_FILES))


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """A model that was converted."""

    source: Path
    method: str | None
    """Quantisation of the source; None if it is not."""
    source_bytes: int
    """Bytes of its tensors."""
    saved: SaveReport
    seconds: float


@torch.no_grad()
def convert(
    name_or_path: str,
    target: Path,
    *,
    dtype: SavedDtype = "auto",
    max_shard_bytes: int = 5_000_000_000,
    trust_remote_code: bool = False,
) -> ConvertReport:
    """Write the model at `name_or_path`, a hub id or directory, to `target`, which must not exist or be empty.

    No communication.

    Args:
        dtype: That of `save_model`; "auto" keeps those of the files, bfloat16 where they are quantised.

    Raises, with nothing left behind:
        InputError: No such model, target not empty, disk full.
        SecurityError: Pickles.
        IntegrityError: Damaged, scales that do not fit, values that `dtype` cannot hold.
    """
    started = time.monotonic()
    check_target(target)
    config, directory = read_model_config(name_or_path, trust_remote_code=trust_remote_code)
    settings = quantisation(config)
    model = build_meta_model(
        config,
        torch.float32,
        directory=directory,
        trust_remote_code=trust_remote_code,
        num_labels=labels_of(config),
    )
    view = ModelView(model)
    with open_weight_files(directory, view.weights_file) as files:
        load = plan_load(view, files)
        check_copies(load, files)
        take_layout(view, load, files)
        saved = save_values(
            view,
            target,
            FileValues(view.unique, load, files),
            tokenizer=sidecar_files(directory, directory, trust_remote_code),
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
        )
        method = None if settings is None else method_of(settings)
        return ConvertReport(directory, method, files.total_bytes, saved, time.monotonic() - started)


class Deltas:
    """The changes that an adapter makes to the weights of its base, read from its opened `files`.

    Raises:
        IntegrityError: The files do not hold exactly what `plan` wants.
    """

    def __init__(self, plan: AdapterPlan, files: WeightFiles) -> None:
        self.targets = {target.weight: target for target in plan.targets}
        """By the name of the adapted weight."""
        self.parts, self.replaced = plan.parts, plan.replaced
        self.unused: dict[str, tuple[int, ...]] = {}
        """The experts whose B is all zero, known once something of the weight has been added."""
        tensors = lazy_tensors(files.tensors)
        self._tensors = model_tensors_from(tensors, plan.targets, plan.replaced, plan.parts, files.directory)
        self._files = files
        # Files hold an expert's two projections in turn.
        self._factors = lru_cache(maxsize=2)(self._read_factors)

    def add(self, weight: str, box: Box, values: Tensor) -> None:
        """Add the delta of `box` of an adapted weight to `values`, which hold that box in fp32 or wider."""
        add_delta(values, box, self.targets[weight], self._factors(weight))

    def replace(self, weight: str, box: Box, values: Tensor) -> Tensor:
        """Return `values` of `box` of a replaced weight with its new values, or with these added."""
        new = self._tensors[new_values_of(weight)]
        dtype = torch.promote_types(new.dtype, values.dtype)
        read = partial(read_values, new, self._files.read, dtype=dtype)
        replaced = replace_values(values, box, self.replaced[weight], read)
        self._refuse_non_finite(weight, replaced)
        return replaced

    def _read_factors(self, weight: str) -> tuple[Tensor, Tensor]:
        """Return A `[E, r, in]` and B `[E, out, r]` in the file's dtype, without E for a matrix."""
        target = self.targets[weight]
        a_ErK, b_ENr = map(self._read, target.factors)
        if target.experts is not None:
            self.unused[weight] = tuple(expert for expert, b_Nr in enumerate(b_ENr) if not bool(b_Nr.any()))
        return a_ErK, b_ENr

    def _read(self, name: str) -> Tensor:
        values = read_values(self._tensors[name], self._files.read)
        self._refuse_non_finite(name, values)
        return values

    def _refuse_non_finite(self, name: str, values: Tensor) -> None:
        if first_not_finite(values) is not None:
            raise not_finite(f"{self._files.directory}: {name}", "; the adapter is damaged, or its training diverged")


class FileValues:
    """Reads a model's values from its files, for `save_values`, with an adapter's changes if there is one.

    What is adapted or replaced comes in fp32 or wider, the others in the dtype of the files.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], load: LoadPlan, files: WeightFiles, deltas: Deltas | None = None
    ) -> None:
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._load, self._files, self._deltas = load, files, deltas

    def __call__(self, leaf: StateTensor, box: Box) -> Tensor:
        name, deltas = self._names[id(leaf.tensor)], self._deltas
        if name not in self._load.tensors and deltas is not None:  # a new head, which is the adapter's alone
            return deltas.replace(name, box, torch.empty(extents(box), dtype=torch.float32))
        lazy = self._load.tensors[name]
        adapted = deltas is not None and name in deltas.targets
        replaced = deltas is not None and name in deltas.replaced
        dtype = torch.promote_types(lazy.dtype, torch.float32) if adapted or replaced else lazy.dtype
        values = read_values(lazy, self._files.read, box, dtype)
        if deltas is not None and adapted:
            deltas.add(name, box, values)
        elif deltas is not None and replaced:
            return deltas.replace(name, box, values)
        return values


def check_copies(load: LoadPlan, files: WeightFiles) -> None:
    """Raise `IntegrityError` for tied tensors of which the files hold copies that differ: one of them would be lost."""
    for name, lazy in load.copies:
        first = load.tensors[name]
        dtype = torch.promote_types(lazy.dtype, first.dtype)
        pairs = zip(_read_in_blocks(lazy, files, dtype), _read_in_blocks(first, files, dtype), strict=True)
        if not all(torch.equal(copy, values) for (_, copy), (_, values) in pairs):
            raise differing_copies(lazy, first)


def check_adapter_copies(targets: Sequence[Target], factors: WeightFiles, load: LoadPlan, files: WeightFiles) -> None:
    """Raise `IntegrityError` for a base weight beside the adapter, which PEFT would read, that is not the base's."""
    stored = lazy_tensors(factors.tensors)
    for key, name in base_copies(stored, targets).items():
        copy, base = stored[key], load.tensors.get(name)
        if base is None:
            raise not_in_base(factors.directory, key, name)
        dtype = min(copy.dtype, base.dtype, key=lambda dtype: dtype.itemsize)
        pairs = zip(_read_in_blocks(copy, factors, dtype), _read_in_blocks(base, files, dtype), strict=False)
        if copy.shape != base.shape or not all(torch.equal(values, other) for (_, values), (_, other) in pairs):
            raise other_base(factors.directory, f"{key} is not the weight of {files.directory}")


def compare_sample(
    model: PreTrainedModel, load: LoadPlan, deltas: Deltas, factors: WeightFiles, directory: Path
) -> Compared:
    """Compare a sample of every adapted weight in `directory`, of one expert where it has experts, with base + adapter.

    Raises `IntegrityError` naming what differs by more than rounding.
    """
    library = LibraryFiles()
    with open_weight_files(directory) as files:
        written = plan_load(ModelView(model), files)
    targets, worst, moved, wanted = list(deltas.targets.values()), 0.0, 0.0, 0.0
    for weight, target in deltas.targets.items():
        if target.name in deltas.parts:
            a_ErK, b_ENr = _of_parts(factors, deltas.parts[target.name], target.shapes)
        else:
            a_ErK, b_ENr = _as_peft_does(factors, keys_in(factors.tensors, target, targets), target.experts or 1)
        # An expert to which something was added, if there is one; a different one in each layer.
        used = b_ENr.flatten(1).any(1).nonzero().flatten().tolist() or [0]
        expert = used[_number_of(weight) % len(used)]
        a_rK, b_Nr = a_ErK[expert].double(), b_ENr[expert].double()
        # PEFT's own file has A and B in each other's places where it takes outputs for inputs.
        flipped = target.transposed and (not target.swapped or target.name in deltas.parts)
        left, right = (a_rK.t(), b_Nr.t()) if flipped else (b_Nr, a_rK)
        has_codes = written.tensors[weight].holds_codes
        first, last = _some_rows(weight, left.shape[0], right.shape[1], _LARGEST_BLOCK if has_codes else 1)
        lead = () if target.experts is None else ((expert, expert + 1),)
        box = (*lead, (first, last), (0, right.shape[1]))
        # Matrices, in the files' dtype.
        base, got = (read_values(plan.tensors[weight], library, box).flatten(0, -2) for plan in (load, written))
        delta = target.scaling * left[first:last] @ right
        size = target.scaling * left[first:last].abs() @ right.abs()
        rounding = max(torch.finfo(tensor.dtype).eps for tensor in (base, got))
        expected = base.double() + delta
        allowed = rounding * expected.abs() + _FP32_ERROR * (base.double().abs() + size)
        if has_codes:
            moved += float(((got.double() - base.double()) * delta).sum())
            wanted += float(delta.square().sum())
        share = _share_of_rounding(got, expected, allowed, has_codes)
        # Not `share > 1`, which holds for no NaN.
        if not share <= 1:
            raise IntegrityError(
                f"{named_source(written.tensors[weight], [start for start, _ in box])} is not base + adapter "
                f"({weight}{'' if target.experts is None else f', expert {expert}'}); report this as a bug",
                key="adapter.merged-wrongly",
            )
        worst = max(worst, share)
    for weight, each in deltas.replaced.items():
        added_to = None if each.scaling is None else load.tensors[weight]
        worst = max(worst, _compare_replaced(weight, each, added_to, written.tensors[weight], factors, library))
    of_experts = sum(target.experts is not None for target in targets)
    count = len(targets) + len(deltas.replaced)
    return Compared(count, of_experts, worst, moved / wanted if wanted else None)


def _compare_replaced(
    weight: str,
    each: Replaced,
    base: LazyTensor | None,
    written: LazyTensor,
    factors: WeightFiles,
    library: LibraryFiles,
) -> float:
    """Return the largest difference of a sample of a replaced weight's rows, as a share of what rounding allows.

    Args:
        base: The weight to which the values are added, if they are.

    Raises `IntegrityError` if rounding does not allow it.
    """
    first, last = _some_rows(weight, each.shape[0], math.prod(each.shape[1:]))
    key = replaced_key(factors.tensors, weight, each)
    with safe_open(factors.tensors[key].path, framework="pt") as file:
        wanted = file.get_slice(key)[first:last].double()
    if base is not None:
        assert each.scaling is not None
        wanted = read_values(base, library, ((first, last),)).double() + each.scaling * wanted
    got = torch.empty(wanted.shape, dtype=written.dtype)
    others = full_box(each.shape)[1:]
    for number, row in enumerate(range(first, last) if each.rows is None else each.rows[first:last]):
        read_box(written, ((row, row + 1), *others), got[number : number + 1], library)
    share = _share_of_rounding(got, wanted, torch.finfo(got.dtype).eps * wanted.abs(), written.holds_codes)
    if not share <= 1:
        raise IntegrityError(
            f"{weight} is not what the adapter holds as {key}; report this as a bug",
            key="adapter.merged-wrongly",
        )
    return share


def _share_of_rounding(got: Tensor, expected: Tensor, allowed: Tensor, has_codes: bool) -> float:
    """Return the largest difference between `got` and `expected`, as a share of what rounding allows.

    Args:
        allowed: The error of each element in the files' dtype; for codes more is added here.
    """
    if has_codes:
        # Two codes of 4 bits are at most a third of the largest value of a block apart.
        allowed = allowed + _HALF_A_CODE * expected.abs().max()
    return float(((got.double() - expected).abs() / allowed.clamp_min(torch.finfo(got.dtype).tiny)).max())


def _read_in_blocks(lazy: LazyTensor, files: WeightFiles, dtype: torch.dtype) -> Iterator[tuple[Box, Tensor]]:
    whole = full_box(lazy.shape)
    # What is computed from others would be computed anew for every block.
    computed = not all(isinstance(piece.leaf, (*FILE_LEAVES, Rounded)) for piece in lazy.pieces)
    for part in [whole] if computed else blocks(whole, _BLOCK_ELEMENTS):
        yield part, read_values(lazy, files.read, part, dtype)


def _as_peft_does(factors: WeightFiles, keys: tuple[str, str], experts: int) -> tuple[Tensor, Tensor]:
    """Return A `[E, r, in]` and B `[E, out, r]`; E is 1 for a matrix."""
    path = factors.tensors[keys[0]].path
    with safe_open(path, framework="pt") as file:
        a, b = (file.get_tensor(key) for key in keys)
    return a.reshape(experts, -1, a.shape[-1]), b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)


def _of_parts(
    factors: WeightFiles, parts: Sequence[Part], shapes: tuple[tuple[int, ...], tuple[int, ...]]
) -> tuple[Tensor, Tensor]:
    """Return A and B as `_as_peft_does`, of adapters on published matrices, each with columns of its own.

    Args:
        shapes: Those of A and B of the target.
    """
    a_ErK, b_ENr = (torch.zeros(shape if len(shape) == 3 else (1, *shape)) for shape in shapes)
    width = a_ErK.shape[1] * a_ErK.shape[0] // len(parts)
    with safe_open(factors.tensors[parts[0].keys[0]].path, framework="pt") as file:
        for part in parts:
            a, b = (file.get_tensor(key) for key in part.keys)
            first = width * (part.rows[0] // (part.rows[1] - part.rows[0]))
            a_ErK[part.expert or 0, first : first + width] = a
            b_ENr[part.expert or 0, slice(*part.rows), first : first + width] = b
    return a_ErK, b_ENr


def _some_rows(weight: str, rows: int, columns: int, block: int = 1) -> tuple[int, int]:
    """Return the first and the last of some rows, of whole blocks: what rounding allows depends on all of a block."""
    count = min(rows, max(1, _SAMPLE_ELEMENTS // columns))
    first = _number_of(weight) % (rows - count + 1)
    return first // block * block, min(rows, -(-(first + count) // block) * block)


def _number_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
