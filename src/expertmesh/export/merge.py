"""Merges an adapter into its base: from two directories to a plain Hugging Face one, on one process, without a GPU.

For `expertmesh merge`. The base streams by in blocks, so that it may be larger than memory; what is written has the
base's own file layout. The base is compared with the one that the adapter was trained on before anything is written,
and samples of what was written are compared with the two directories afterwards. Never runs the model.
"""

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertmesh.adapters.base import read_base
from expertmesh.adapters.peft_format import BASE_FILE, CONFIG_FILE, WEIGHTS_FILE, read_config
from expertmesh.adapters.plan import AdapterPlan, plan_adapters
from expertmesh.config import LoraConfig
from expertmesh.config.errors import InputError, IntegrityError
from expertmesh.export.deltas import Deltas
from expertmesh.export.merge_check import Compared, base_hash, check_copies, compare_sample
from expertmesh.io.boxes import Box, extents
from expertmesh.io.directory import check_target
from expertmesh.io.safetensors_reader import INDEX_FILE, WeightFiles, open_weight_files
from expertmesh.weights.companions import CopiedFiles
from expertmesh.weights.load import weights_file
from expertmesh.weights.mapping import LoadPlan, StateTensor, model_tensors, plan_load, tied_names
from expertmesh.weights.meta_model import DATA_FILES, build_meta_model, read_model_config
from expertmesh.weights.reading import read_box
from expertmesh.weights.save import SaveReport, save_values
from expertmesh.weights.unmapped import remember

_NOT_COPIED = {"config.json", INDEX_FILE, CONFIG_FILE, BASE_FILE}
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*")
_MORE_TEMPLATES = "additional_chat_templates/*.jinja"


@dataclass(frozen=True, slots=True)
class MergeReport:
    """`base` is its directory; `base_checked`: the adapter said which weights it was trained on, and these are they.

    `unused[weight]` are the experts of an adapted weight whose B is all zero: nothing was added to them.
    """

    plan: AdapterPlan
    base: Path
    base_checked: bool
    saved: SaveReport
    unused: dict[str, tuple[int, ...]]
    compared: Compared
    seconds: float


@torch.no_grad()
def merge(
    adapter: Path,
    target: Path,
    *,
    base: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    trust_remote_code: bool = False,
) -> MergeReport:
    """Write base + adapter to `target`, which must not exist or be empty. `adapter` is a directory of PEFT.

    `base` is a hub id or directory (None: what the adapter's config says), `dtype` that of the weights written (None:
    those of the base's files). Raises, with nothing left behind: `InputError` (what cannot be merged, no such base,
    target not empty, disk full), `SecurityError` (pickles), `IntegrityError` (damaged, keys missing, another base than
    the adapter was trained on, values that `dtype` cannot hold).
    """
    started = time.monotonic()
    check_target(target)
    content = read_config(adapter)
    if not (adapter / WEIGHTS_FILE).exists():
        raise InputError(f"{adapter}: has no {WEIGHTS_FILE}", key="adapter.no-weights")
    model, directory = _base_model(adapter, content, base, trust_remote_code)
    plan = plan_adapters(model, LoraConfig(from_adapter=str(adapter)), str(directory))
    with (
        open_weight_files(directory, weights_file(model)) as files,
        open_weight_files(adapter, WEIGHTS_FILE) as factors,
    ):
        load = plan_load(model, files)
        deltas = Deltas(model, plan, factors)
        check_copies(load, files)
        checked = _check_base(adapter, model, load, files, trust_remote_code)
        _take_layout(model, load, files)
        saved = save_values(
            model,
            target,
            _Merged(model, load, files, deltas),
            tokenizer=CopiedFiles(_companions(directory, adapter, trust_remote_code)),
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
        )
        try:
            compared = compare_sample(model, load, deltas, factors, saved.directory)
        except IntegrityError:
            shutil.rmtree(saved.directory)
            raise
    return MergeReport(plan, directory, checked, saved, deltas.unused, compared, time.monotonic() - started)


class _Merged:
    """Values of the base with the adapter's deltas, for `save_values`; what is adapted comes in fp32 or wider."""

    def __init__(self, model: PreTrainedModel, load: LoadPlan, files: WeightFiles, deltas: Deltas) -> None:
        self._names = {id(tensor): name for name, tensor in _untied(model).items()}
        self._load, self._files, self._deltas = load, files, deltas

    def __call__(self, leaf: StateTensor, box: Box) -> Tensor:
        name = self._names[id(leaf.tensor)]
        lazy, adapted = self._load.tensors[name], name in self._deltas.targets
        dtype = torch.promote_types(lazy.dtype, torch.float32) if adapted else lazy.dtype
        values = torch.empty(extents(box), dtype=dtype)
        read_box(lazy, box, values, self._fetch)
        if adapted:
            self._deltas.add(name, box, values)
        return values

    def _fetch(self, leaf: Any, box: Box, out: Tensor) -> None:
        self._files.read(leaf, box, out)


def _base_model(
    adapter: Path, content: dict[str, Any], base: str | None, trust_remote_code: bool
) -> tuple[PreTrainedModel, Path]:
    """The base on meta, and its directory."""
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
    model = build_meta_model(config, torch.float32, directory=directory, trust_remote_code=trust_remote_code)
    return model, directory


def _check_base(
    adapter: Path, model: PreTrainedModel, load: LoadPlan, files: WeightFiles, trust_remote_code: bool
) -> bool:
    """Whether the adapter says which weights it was trained on. `IntegrityError` unless they are those in `files`."""
    path = adapter / BASE_FILE
    if not path.exists():
        return False
    trained_on = read_base(path, path.read_bytes())
    dtype = getattr(torch, trained_on.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise IntegrityError(
            f"{path}: says that the base was {trained_on.dtype}, which is no dtype", key="adapter.damaged"
        )
    as_trained = build_meta_model(model.config, dtype, trust_remote_code=trust_remote_code)
    here = base_hash(_untied(as_trained), load, files)
    if here != trained_on.sha256:
        raise IntegrityError(
            f"{path}: the adapter was trained on another base (weights {trained_on.sha256[:12]} in {trained_on.dtype}) "
            f"than {files.directory} ({here[:12]}); give --base the one it was trained on",
            key="adapter.other-base",
        )
    return True


def _take_layout(model: PreTrainedModel, load: LoadPlan, files: WeightFiles) -> None:
    """Let `model` be saved in the dtypes and the layout of its files, with what they hold beside it."""
    for name, tensor in _untied(model).items():
        if tensor.is_floating_point():
            # On meta the dtype is all there is to change; ties and parameter identity stay.
            tensor.data = tensor.data.to(load.tensors[name].dtype)
    model._weight_conversions = list(load.conversions)  # type: ignore[assignment]
    remember(model, [files.tensors[name] for name in load.ignored])


def _untied(model: PreTrainedModel) -> dict[str, Tensor]:
    """Each tensor once, under the first of its names."""
    state = model_tensors(model)
    return {names[0]: state[names[0]] for names in tied_names(state)}


def _companions(base: Path, adapter: Path, code: bool) -> dict[str, Path]:
    """What belongs beside the weights: the base's small files, and the tokenizer that the adapter was trained with."""
    patterns = [pattern for pattern in DATA_FILES if pattern != "*.safetensors"] + ["*.py"] * code
    found = {path.name: path for pattern in patterns for path in base.glob(pattern)}
    files = {name: path for name, path in found.items() if name not in _NOT_COPIED and not name.endswith(".index.json")}
    for source, wanted in ((base, [_MORE_TEMPLATES]), (adapter, [*_TOKENIZER, _MORE_TEMPLATES])):
        for path in _files(source, wanted):
            files[path.relative_to(source).as_posix()] = path
    return files


def _files(directory: Path, patterns: list[str]) -> Iterator[Path]:
    yield from (path for pattern in patterns for path in sorted(directory.glob(pattern)) if path.is_file())
