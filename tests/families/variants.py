"""`python -m tests.families.variants [NAME ...]`: families with other settings than the rows of docs/models.md have.

A variant is a family's tiny configuration with one switch turned, or with its kinds of layers the other way round, or a
published configuration of `tests/published` at tiny sizes and with as few layers as show every kind. Each is held to
the measure of proof.py on ep and every further axis, and to packing.py's, unless it is refused by name. Exit 1 when a
proof does not hold. NAME: a family, or a file of `tests/published`. All of them take two hours on two cores.
"""

import json
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from expertmesh.introspection import proofs
from tests.families.axes import AXES, refusal_of, run_of
from tests.families.catalogue import families
from tests.families.packing import packing_of
from tests.families.proof import Run, Subject, prove
from tests.families.table import proof_cell
from tests.families.tiny import CHANGES, SIZES, random_model, tiny_config, turned_switches

PUBLISHED = sorted(Path(__file__).parents[1].glob("published/*.json"))
# Of generation, of files, of what a forward returns beside.
_IDLE = {"is_encoder_decoder", "use_cache", "output_router_logits"}
# Not of the code: names, dtypes, what the tiny model has its own of.
_OF_FILES = {"architectures", "transformers_version", "torch_dtype", "dtype", "auto_map", "quantization_config"}
_OF_FILES |= {"model_type", "num_hidden_layers", "attention_dropout", "num_nextn_predict_layers", "max_window_layers"}
# As many layers as show every kind; two otherwise.
_LAYERS = {"Qwen--Qwen3.5-35B-A3B": 4, "deepseek-ai--DeepSeek-V4-Flash": 6, "ibm-granite--granite-4.0-h-small": 6}
_LAYERS |= {"meta-llama--Llama-4-Scout-17B-16E-Instruct": 4}


@dataclass(frozen=True, slots=True)
class Variant:
    """A model class at the tiny configuration `changes`, which is known as the family `name` once it is registered."""

    name: str
    model_class: str
    changes: dict[str, Any]

    def register(self) -> None:
        CHANGES[self.name] = self.changes


def switches(names: Sequence[str] = ()) -> Iterator[Variant]:
    """Each switch of each family (of those `names`, if there are any) turned."""
    for family in families():
        kind = family.model_class
        if kind is None or (names and family.name not in names):
            continue
        config = tiny_config(kind, family.name)
        text, own = config.get_text_config(), CHANGES.get(family.name, {})
        place = next((key for key in config.sub_configs or {} if getattr(config, key, None) is text), None)
        turned = {key: value for key, value in turned_switches(text).items() if key not in _IDLE}
        lists = {key: value for key, value in text.to_dict().items() if proofs.matters(key) and type(value) is list}
        turned |= {key: kinds[::-1] for key, kinds in lists.items() if str in map(type, kinds) and kinds != kinds[::-1]}
        for key, value in turned.items():
            more = {key: value, "num_hidden_layers": len(value)} if isinstance(value, list) else {key: value}
            changes = {**own, **more} if place is None else {**own, place: {**own.get(place, {}), **more}}
            yield Variant(f"{family.name} {key}={value}", kind, changes)


def published(names: Sequence[str] = ()) -> Iterator[Variant]:
    """The published configurations of the examples' models, tiny."""
    for path in PUBLISHED:
        if names and path.stem not in names:
            continue
        content = json.loads(path.read_text())
        family, layers = content["model_type"], _LAYERS.get(path.stem, 2)
        own = CHANGES.get("llama4_published" if family == "llama4" else family, {})
        changes = _cut(content, layers)
        for key in changes.keys() & own.keys():
            if isinstance(changes[key], dict):
                changes[key] = {**own[key], **changes[key]}
        yield Variant(path.stem, content["architectures"][0], {**own, **changes, **_rates(own)})


def _cut(content: dict[str, Any], layers: int) -> dict[str, Any]:
    """Without sizes, and with so many layers."""
    kept = {key: value for key, value in content.items() if key not in _OF_FILES and key not in SIZES}
    kept = {key: value for key, value in kept.items() if key != "vision_config" and not key.endswith("_token_id")}
    for key, value in kept.items():
        if isinstance(value, list) and len(value) > layers and key != "eos_token_id":
            kept[key] = value[:layers]
        elif key == "text_config":
            kept[key] = _cut(value, layers)
    return kept if "text_config" in kept else {**kept, "num_hidden_layers": layers}


def _rates(own: dict[str, Any]) -> dict[str, Any]:
    """What has to fit the short rows of a proof, whatever is published."""
    return {key: own[key] for key in ("compress_rates", "o_groups", "o_lora_rank") if key in own}


def prove_variant(variant: Variant) -> str:
    """What was measured, or why it is refused. Raises what does not hold."""
    kind, name = variant.model_class, variant.name
    refused = {axis: reason for axis in AXES if (reason := refusal_of(kind, name, axis))}
    if len(refused) == len(AXES):
        return next(iter(refused.values()))
    packing = packing_of(kind, name)
    with tempfile.TemporaryDirectory(prefix="variant-") as scratch:
        runs = {"parity": [Run((2, 2, "grouped_mm"))], **{axis: [run_of(axis)] for axis in AXES if axis not in refused}}
        proofs: dict[str, Any] = {**prove(Subject(kind, name, Path(scratch)), runs), **refused}
    return ", ".join(
        [*(f"{what} {proof_cell(proof)}" for what, proof in proofs.items()), f"packing {packing or 'exact'}"]
    )


def main(names: list[str]) -> int:
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    failed = 0
    for variant in (*published(names), *switches(names)):
        variant.register()
        started = time.monotonic()
        try:
            model: Any = random_model(variant.model_class, variant.name)
            model(input_ids=torch.arange(3, 20)[None], use_cache=False)
        except Exception as error:
            print(f"{variant.name:48} does not run: {type(error).__name__}: {str(error)[:80]}", flush=True)
            continue
        try:
            said = prove_variant(variant)
        except Exception as error:
            traceback.print_exception(error)
            said, failed = f"FAILED: {type(error).__name__}", failed + 1
        print(f"{variant.name:48} {time.monotonic() - started:5.1f} s  {said}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
