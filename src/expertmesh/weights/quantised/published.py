"""Find which tensors of published files belong together: codes and their scales, by the method that the config names.

Everything is decided from `quantization_config` and the files' headers, in released names, before transformers' rules
rename anything. Nothing here depends on a family. An error names file and tensor of anything that does not fit.

`published_formats` finds in which format the codes of frozen weights can stay in memory. Files hold gate and up of each
expert apart, or experts stacked; in memory their rows lie one after the other, codes and scales unchanged. Each row of
a linear layer has the scales of its blocks. tensor.py reads the bytes.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from expertmesh.anatomy import describe, packable_linears
from expertmesh.config.errors import InputError, IntegrityError
from expertmesh.io.boxes import extents, full_box
from expertmesh.io.safetensors_reader import FileTensor, WeightFiles
from expertmesh.state.codes import Code, Factor, PackedFormat, has_exponents, not_packed
from expertmesh.weights.lazy import LazyTensor, lazy_tensors
from expertmesh.weights.quantised.tensor import CODES_PER_ELEMENT, QuantisedTensor, in_order_of_rows

Block = tuple[int, int]
_MX, _NV = (1, 32), (1, 16)


@dataclass(frozen=True, slots=True)
class PublishedTensors:
    """The tensors that the files hold, with codes and their scales joined into one tensor of values."""

    tensors: Mapping[str, LazyTensor]
    """By name: plain tensors unchanged, quantised ones as tensors of values."""
    stored: Mapping[str, tuple[str, ...]]
    """The names of the file tensors behind each tensor."""
    quantised: tuple[str, ...] = ()
    """The names of the quantised tensors, in an order that all ranks share: they write them by collectives."""
    settings: Mapping[str, Any] | None = None
    """The files' `quantization_config`."""


def published_tensors(settings: Mapping[str, Any] | None, files: WeightFiles) -> PublishedTensors:
    """Return the tensors of `files`; quantised ones are read as the values that their codes represent.

    Only the headers that `files` already has are used.

    Args:
        settings: The result of `quantisation` for the model's config.

    Raises:
        InputError: The method or the variant is not supported.
        IntegrityError: Codes without scales, scales without codes, or grids that do not fit.
    """
    tensors = lazy_tensors(files.tensors)
    stored = {name: (name,) for name in tensors}
    if settings is None:
        return PublishedTensors(tensors, stored)
    grouping = _Grouping(files, dict(settings))
    refuse_other_methods(settings, files.directory)
    read, suffixes = _METHODS[method_of(settings)]
    try:
        read(grouping)
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise InputError(
            f"{files.directory}: quantization_config in config.json is not one of {method_of(settings)} "
            f"({type(error).__name__}: {error}); download it again",
            key="model.quantised",
        ) from error
    grouping.refuse_leftovers(suffixes)
    for names in grouping.taken.values():
        for name in names:
            tensors.pop(name, None)
            stored.pop(name, None)
    found = tensors | grouping.found, stored | grouping.taken
    return PublishedTensors(*found, tuple(grouping.found), settings)


def quantisation(config: PreTrainedConfig) -> dict[str, Any] | None:
    """Return the `quantization_config` of a model's config as plain data, or None if the model is not quantised."""
    settings = getattr(config, "quantization_config", None)
    return settings if settings is None or isinstance(settings, dict) else settings.to_dict()


def method_of(settings: Mapping[str, Any]) -> str:
    return str(settings.get("quant_method"))


def refuse_other_methods(settings: Mapping[str, Any] | None, where: object) -> None:
    """Raise `InputError` for the `quantization_config` of files that are quantised by an unsupported method."""
    if settings is not None and method_of(settings) not in _METHODS:
        raise InputError(
            f"{where}: weights are quantised by {method_of(settings)!r}, which is not supported (supported: "
            f"{', '.join(sorted(_METHODS))}); take a bfloat16 or float32 copy of the model",
            key="model.quantised",
        )


@dataclass(slots=True)
class _Grouping:
    """Collects quantised tensors; each file tensor is taken once."""

    files: WeightFiles
    settings: dict[str, Any]
    found: dict[str, LazyTensor] = field(default_factory=dict)
    taken: dict[str, tuple[str, ...]] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def having(self, suffix: str, *dtypes: torch.dtype) -> Iterator[tuple[str, FileTensor]]:
        """Yield (name without `suffix`, tensor) for names that end in `suffix`, of one of `dtypes` if given."""
        for name, tensor in self.files.tensors.items():
            if name.endswith(suffix) and (not dtypes or tensor.dtype in dtypes):
                yield name.removesuffix(suffix), tensor

    def part(self, codes: FileTensor, *names: str) -> FileTensor:
        """Return the scale of `codes`: the one tensor of `names` that the files hold.

        Raises:
            IntegrityError: The files hold none or several of them.
        """
        there = [self.files.tensors[name] for name in names if name in self.files.tensors]
        if len(there) != 1:
            problem = "has no scale" if not there else f"has {len(there)} scales"
            raise _refused(codes, f"{problem}; one of {', '.join(names)} is expected")
        return there[0]

    def optional(self, name: str) -> FileTensor | None:
        return self.files.tensors.get(name)

    def add(
        self,
        name: str,
        tensor: QuantisedTensor,
        unused: Sequence[str] = (),
        arrange: Callable[[LazyTensor], Any] = lambda lazy: lazy,
    ) -> None:
        """Take the parts of `tensor`, and those of `unused` that exist: scales of activations, unused by weights."""
        names = (*(part.name for part in tensor.parts), *(each for each in unused if each in self.files.tensors))
        self.found[name] = arrange(LazyTensor.of(tensor))
        self.taken[name] = names
        self.used.update(names)

    def refuse_leftovers(self, suffixes: tuple[str, ...]) -> None:
        """Raise `IntegrityError` for a tensor that only quantised files hold and that was not taken.

        Such a tensor is an 8-bit float, or its name ends in one of `suffixes`.
        """
        for name, tensor in self.files.tensors.items():
            if name in self.used:
                continue
            codes = tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point
            if codes or name.endswith(suffixes):
                raise _refused(tensor, f"({tensor.dtype}) belongs to no quantised weight that is understood")


def _fine_grained_fp8(grouping: _Grouping) -> None:
    """Group the files of DeepSeek-V3 and its successors: blocks of e4m3.

    Also e8m0 scales, 4-bit experts, and Mistral's single scale.
    """
    block, powers = grouping.settings.get("weight_block_size"), grouping.settings.get("scale_fmt") == "ue8m0"
    for name, codes in list(grouping.having("", torch.float8_e4m3fn, torch.int8)):
        stem = name.removesuffix(".weight")
        names = [f"{name}_scale_inv", *([f"{stem}.scale", f"{stem}.qscale_weight"] if stem != name else [])]
        scale = grouping.part(codes, *names)
        exponents = has_exponents(scale.dtype)
        if codes.dtype == torch.int8:
            tensor = _tensor(name, codes, scale, "e2m1", [_MX])
        else:
            blocks = [tuple(block)] if block else []
            fits = [*blocks, *([_MX] if exponents else [])]
            tensor = _tensor(name, codes, scale, "e4m3", fits, powers_of_two=powers and not exponents)
        grouping.add(name, tensor, [f"{stem}.{each}" for each in ("activation_scale", "input_scale", "qscale_act")])


def _mxfp4(grouping: _Grouping) -> None:
    """Group GPT-OSS: `X_blocks` [E, out, in/32, 16] and `X_scales`; the model's own parameter is [E, in, out]."""
    for name, codes in list(grouping.having("_blocks", torch.uint8)):
        tensor = _tensor(name, codes, grouping.part(codes, f"{name}_scales"), "e2m1", [_MX])
        grouping.add(name, tensor, arrange=lambda lazy: lazy.transpose(-1, -2))


def _compressed_tensors(grouping: _Grouping) -> None:
    """Group packed int4, MXFP4 and NVFP4 (`weight_packed`), and e4m3 (`weight`), each with `weight_scale`."""
    if (grouping.settings.get("transform_config") or {}).get("config_groups"):
        raise InputError(
            f"{grouping.files.directory}: weights are quantised by compressed-tensors with transforms of weights or "
            "activations (transform_config), which expertmesh does not apply; take a bfloat16 copy of the model",
            key="model.quantised",
        )
    groups = [group["weights"] for group in (grouping.settings.get("config_groups") or {}).values()]
    for weights in groups:
        kind = (weights.get("type", "int"), weights.get("num_bits", 8))
        if kind not in {("int", 4), ("float", 4), ("float", 8)} or weights.get("actorder") in ("group", "dynamic"):
            raise InputError(
                f"{grouping.files.directory}: weights are quantised by compressed-tensors as {kind[0]}{kind[1]}"
                f" (actorder {weights.get('actorder')}), which is not supported; take a bfloat16 copy of the model",
                key="model.quantised",
            )
    packed = [(name, codes) for name, codes in grouping.having(".weight_packed")]
    plain = [(name, codes) for name, codes in grouping.having(".weight", torch.float8_e4m3fn)]
    for stem, codes in packed + plain:
        scale = grouping.part(codes, f"{stem}.weight_scale")
        integers = codes.dtype == torch.int32
        code: Code = "int4" if integers else "e2m1" if codes.dtype == torch.uint8 else "e4m3"
        bits = {"int4": ("int", 4), "e2m1": ("float", 4), "e4m3": ("float", 8)}[code]
        kin = [each for each in groups if (each.get("type", "int"), each.get("num_bits", 8)) == bits]
        options: dict[str, Any] = {}
        if any(not each.get("symmetric", True) for each in kin):
            options["zero_point"] = point = grouping.optional(f"{stem}.weight_zero_point")
            if point is None and not any(each.get("symmetric", True) for each in kin):
                raise _refused(codes, f"has no {stem}.weight_zero_point")
        if code == "e2m1":
            options["global_scale"] = grouping.optional(f"{stem}.weight_global_scale")
        blocks: list[Block] = []  # none for one scale per row or tensor
        for each in kin:
            if each.get("block_structure"):
                rows, columns = each["block_structure"]
                blocks.append((rows, columns))
            elif (each.get("group_size") or 0) > 0:
                blocks.append((1, each["group_size"]))
        tensor = _tensor(
            f"{stem}.weight", codes, scale, code, blocks,
            dtype=scale.dtype if integers else torch.float32,
            stored_shape=grouping.optional(f"{stem}.weight_shape"), global_divides=True, **options,
        )  # fmt: skip
        if code == "e2m1" and scale.dtype == torch.float8_e4m3fn and tensor.global_scale is None:  # NVFP4
            raise _refused(codes, f"has no {stem}.weight_global_scale")
        grouping.add(f"{stem}.weight", tensor, [f"{stem}.input_scale", f"{stem}.input_global_scale"])


def _modelopt(grouping: _Grouping) -> None:
    """Group NVIDIA ModelOpt's NVFP4: bytes of two codes, e4m3 scales of 16, and one fp32 factor `weight_scale_2`."""
    algorithm = grouping.settings.get("quant_algo")
    if algorithm != "NVFP4":
        raise InputError(
            f"{grouping.files.directory}: weights are quantised by modelopt as {algorithm}, which is not supported "
            "(supported: NVFP4); take a bfloat16 copy of the model",
            key="model.quantised",
        )
    for name, codes in list(grouping.having(".weight", torch.uint8)):
        scale = grouping.part(codes, f"{name}.weight_scale")
        total = grouping.part(codes, f"{name}.weight_scale_2")
        tensor = _tensor(f"{name}.weight", codes, scale, "e2m1", [_NV], global_scale=total)
        grouping.add(f"{name}.weight", tensor, [f"{name}.input_scale"])


_PACKED = (
    ".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_global_scale", ".weight_g_idx",
)  # fmt: skip
# For each method: the function that groups its tensors, and the suffixes of names that only its files have.
_METHODS: dict[str, tuple[Callable[[_Grouping], None], tuple[str, ...]]] = {
    "fp8": (_fine_grained_fp8, ("_scale_inv", ".qscale_weight")),
    "mxfp4": (_mxfp4, ("_blocks", "_scales")),
    "compressed-tensors": (_compressed_tensors, _PACKED),
    "modelopt": (_modelopt, (".weight_scale", ".weight_scale_2")),
}


def _tensor(
    name: str, codes: FileTensor, scale: FileTensor, code: Code, blocks: Sequence[Block], **options: Any
) -> QuantisedTensor:
    """Join codes and scale into one tensor, with the block of `blocks` that the grid of the scale fits.

    Raises:
        IntegrityError: The codes are not a matrix, or no block fits the scale.
    """
    if len(codes.shape) < 2:
        raise _refused(codes, f"has the shape {list(codes.shape)}; quantised weights are matrices")
    # The shape of the values; a file may store the bytes of a block in a separate dim.
    trailing = len(codes.shape) == len(scale.shape) + 1 and len(codes.shape) > 3
    *rest, last = codes.shape[:-1] if trailing else codes.shape
    shape = (*rest, last * CODES_PER_ELEMENT[code] * (codes.shape[-1] if trailing else 1))
    scalar, rowwise = math.prod(scale.shape) == 1, scale.shape in (shape[:-1], (*shape[:-1], 1))
    *lead, rows, columns = shape
    fitting = [each for each in blocks if scale.shape == (*lead, -(-rows // each[0]), -(-columns // each[1]))]
    if scalar:
        fitting.insert(0, (rows, columns))
    elif rowwise and not fitting:
        fitting.append((1, columns))
    if not fitting:
        known = f" in blocks of {' or '.join(map(str, map(list, blocks)))}" if blocks else ""
        raise _refused(
            scale, f"has the shape {list(scale.shape)}, which does not fit {codes.name} {list(shape)}{known}"
        )
    dtype = options.pop("dtype", torch.float32)
    return QuantisedTensor(name, shape, dtype, code, fitting[0], codes, scale, **options)


def _refused(tensor: FileTensor, problem: str) -> IntegrityError:
    return IntegrityError(f"{tensor.path}: tensor {tensor.name} {problem}", key="weights.quantised-wrongly")


def published_formats(model: nn.Module, tensors: Mapping[str, LazyTensor]) -> dict[str, PackedFormat]:
    """Return the format of each weight whose codes can stay as the files hold them, by parameter name.

    A linear layer whose codes cannot stay is left out.

    Raises:
        InputError: The codes of experts cannot stay, or no experts of the model are quantised.
    """
    anatomy = describe(model)
    formats = {}
    for spec in anatomy.experts:
        for leaf in (spec.up, spec.down):
            name = f"{spec.name}.{leaf}"
            lazy = tensors[name]
            found = [isinstance(leaf, QuantisedTensor) for leaf in lazy.leaves()]
            if not any(found):
                continue
            kinds = {_format_of_expert(name, lazy, expert, spec.transposed) for expert in range(lazy.shape[0])}
            if not all(found) or len(kinds) != 1:
                raise not_packed("as_published", f"the experts of {name} are not all quantised alike")
            formats[name] = kinds.pop()
    if not formats:
        raise not_packed("as_published", "the files hold plain weights; choose nf4, mxfp4, nvfp4 or float8")
    for name in packable_linears(model, anatomy):
        if (kind := _format_of_rows(tensors[f"{name}.weight"])) is not None:
            formats[f"{name}.weight"] = kind
    return formats


def _format_of_rows(lazy: LazyTensor) -> PackedFormat | None:
    """Return the format of a linear layer.

    Returns:
        None for plain weights, and for codes that do not cover full rows of the model's matrix.
    """
    whole = full_box(lazy.shape)
    kinds = set()
    for piece in lazy.pieces:
        leaf = piece.leaf
        along = piece.dims == (0, 1) and piece.dest[1] == whole[1] and piece.source[1] == whole[1]
        if not isinstance(leaf, QuantisedTensor) or leaf.zero_point is not None or not along:
            return None
        kinds.add(_kind(leaf))
    if len(kinds) != 1:
        return None
    code, block, scale, factor, dtype = kinds.pop()
    return PackedFormat("as_published", code, (1, block[1]), scale, (1,), lazy.shape[1], factor, dtype, by_rows=True)


def _format_of_expert(name: str, lazy: LazyTensor, expert: int, transposed: bool) -> PackedFormat:
    box = ((expert, expert + 1), *full_box(lazy.shape)[1:])
    pieces = in_order_of_rows(lazy.pieces_in(box), box, transposed)
    first = pieces[0].leaf
    if not isinstance(first, QuantisedTensor):
        raise _cannot_stay(name, first.name)
    columns = lazy.shape[1 if transposed else 2]
    for piece in pieces:
        leaf = piece.leaf
        if not isinstance(leaf, QuantisedTensor) or _kind(leaf) != _kind(first) or leaf.zero_point is not None:
            raise _cannot_stay(name, leaf.name)
        if extents(piece.source)[-2:] != leaf.shape[-2:] or leaf.shape[-1] != columns:
            raise _cannot_stay(name, leaf.name)
    code, block, scale, factor, dtype = _kind(first)
    parts = tuple(piece.leaf.shape[-2] for piece in pieces)
    return PackedFormat("as_published", code, block, scale, parts, columns, factor, dtype, transposed)


def _kind(leaf: QuantisedTensor) -> tuple[Code, tuple[int, int], torch.dtype, Factor, torch.dtype]:
    scale = torch.uint8 if has_exponents(leaf.scale.dtype) else leaf.scale.dtype
    return leaf.code, leaf.block, scale, leaf.factor, leaf.dtype


def _cannot_stay(name: str, stored: str) -> InputError:
    return not_packed("as_published", f"the codes of {name} cannot stay as {stored} holds them; choose another format")
