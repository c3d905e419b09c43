"""`expertmesh init MODEL --data FILE [KEY=VALUE]`: a configuration of a dozen lines that fits a model, its data, these
devices.

For someone's first run. `plan` chooses layout, micro-batch and activation checkpointing, for full fine-tuning if that
fits, else for adapters, at last with experts in 4 bits; the data say what is trained and how much a step takes. Each
choice stands in the file with its reason, and gives way to KEY=VALUE. Reads config.json, the tokenizer and the first
rows of the data; never overwrites a file.
"""

import copy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from expertmesh.cli.data.check import note_lines
from expertmesh.cli.options import InitOptions
from expertmesh.cli.plan.choose import Choice, Sizes, Wishes, choose, devices_of, enough_rows, sizes_of
from expertmesh.cli.plan.first_rows import FirstRows, first_rows
from expertmesh.cli.plan.read import usual_length
from expertmesh.cli.printing import bytes_text
from expertmesh.config import Config
from expertmesh.config.errors import ExpertmeshError, InputError
from expertmesh.config.files import config_from, make_config
from expertmesh.config.overrides import apply_override
from expertmesh.config.yaml_text import dump_yaml
from expertmesh.data import load_tokenizer
from expertmesh.io.terminal import plural
from expertmesh.planning.forecast import forecast
from expertmesh.planning.hardware import Devices
from expertmesh.planning.search import GIB, run_costs
from expertmesh.training.startup.model_check import Checked
from expertmesh.training.startup.preflight import preflight
from expertmesh.weights.meta_model import read_model_config

# Sections whose keys have a line each.
_BLOCKS = ("model", "data", "train")


def run(options: InitOptions) -> int:
    """Write the file and print it; returns 0. `InputError` for what `train` would refuse, and when nothing fits."""
    name = options.model.rstrip("/").rpartition("/")[2]
    path = Path(options.output or f"{name}.yaml")
    if path.exists():
        raise _refuse_existing(path)
    devices, overrides = devices_of(options), options.overrides or []
    wishes = _wishes(options, path, overrides)
    model = wishes.config.model
    config, _ = read_model_config(model.name_or_path, model.revision, model.trust_remote_code, weights=False)
    length = usual_length(config)
    if wishes.has("data", "max_length"):
        length = wishes.config.data.max_length
    data = wishes.config.data.model_copy(update={"max_length": length})
    found = first_rows(
        wishes.config.model_copy(update={"data": data}),
        load_tokenizer(model, data.chat_template),
        int(config.get_text_config().vocab_size),
        enough_rows(devices, length),
    )
    if found.objective != wishes.config.objective:
        wishes = replace(wishes, config=wishes.config.model_copy(update={"objective": found.objective}))
    sizes = sizes_of(found, wishes, devices, length)
    choice = choose(options, wishes, config, devices, sizes)
    values = _values(wishes, path, choice, sizes)
    for override in overrides:
        apply_override(values, override)
    values["output_dir"] = values.pop("output_dir")
    written = make_config(copy.deepcopy(values), source=str(path))
    notes: list[ExpertmeshError] = []
    checked = preflight(written, devices.count, devices.per_node, weights=False, notes=notes)
    comments = _comments(written, checked, choice, sizes, found)
    head = _head(written, checked, path, choice)
    text = "\n".join([*head, *_lines(values, _without(comments, overrides))]) + "\n"
    assert config_from(text, str(path)) == written
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise _refuse_existing(path) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})", key="cli.unwritable-report") from error
    sys.stdout.write(text)
    print(f"wrote {path}")
    if options.devices is None:
        print("\n".join(note_lines(notes)), end="\n" * bool(notes))
    return 0


def _refuse_existing(path: Path) -> InputError:
    return InputError(f"{path} exists already and stays as it is; choose another --output", key="init.exists")


def _wishes(options: InitOptions, path: Path, overrides: list[str]) -> Wishes:
    """Return the configuration that the command line requests; all else is chosen."""
    given: dict[str, Any] = {}
    for override in overrides:
        apply_override(given, override)
    values: dict[str, Any] = {
        "model": {"name_or_path": options.model, "trust_remote_code": options.trust_remote_code},
        "data": {"train": [{"path": options.data}]},
        "output_dir": f"runs/{path.stem}",
    }
    if options.max_length is not None:
        given["data"] = values["data"] = {"max_length": options.max_length, **values["data"], **given.get("data", {})}
    if (rows := (given.get("train") or {}).get("micro_batch_size")) is not None:
        values["train"] = {"global_batch_size": rows}  # what is chosen is a multiple as well
    if options.lora or (given.get("precision") or {}).get("frozen"):
        values["lora"] = {}
    return Wishes(given, make_config(values, overrides, "the command line"))


def _values(wishes: Wishes, path: Path, choice: Choice, sizes: Sizes) -> dict[str, Any]:
    """Return the keys that are written, before KEY=VALUE."""
    given, best, way = wishes.config, choice.best, choice.way
    responses = given.objective.of_responses
    values: dict[str, Any] = {"model": {"name_or_path": given.model.name_or_path}}
    if given.model.trust_remote_code:
        values["model"]["trust_remote_code"] = True
    compute = choice.job.model.precision.compute
    precision: dict[str, Any] = {"compute": compute} if compute != "bfloat16" else {}
    precision |= {"frozen": way.frozen} if way.frozen else {}
    if precision:
        values["precision"] = precision
    values["data"] = {"train": [{"path": given.data.train[0].path}], "max_length": choice.job.model.length}
    if not responses and (choice.why_unpacked is not None or not sizes.packed):
        values["data"]["packing"] = False
    if way.lora is not None:
        said = {"r": 16, "alpha": 32, "targets": list(way.lora.targets)}
        values["lora"] = {} if way.lora.from_adapter is not None else said
    if responses:
        values["objective"] = {"name": given.objective.name}
    rates = {(False, False): 1e-5, (True, False): 1e-4, (False, True): 1e-6, (True, True): 5e-6}
    values["optim"] = {"learning_rate": rates[way.lora is not None, responses]}
    values["train"] = {
        "global_batch_size": sizes.global_batch_size,
        "micro_batch_size": best.workload.batch.rows // given.objective.sequences,
        "activation_checkpointing": best.workload.mode,
        "num_epochs": sizes.epochs,
    }
    axes = {axis: best.layout.size(axis) for axis in ("ep", "fsdp", "replicate", "tp", "cp", "pp")}
    values["parallel"] = {axis: size for axis, size in axes.items() if size > 1 or axis in ("ep", "fsdp")}
    return values | {"output_dir": f"runs/{path.stem}"}


def _comments(
    config: Config, checked: Checked, choice: Choice, sizes: Sizes, found: FirstRows
) -> dict[tuple[str, ...], str]:
    """Return the reason of each choice, by its key."""
    layout, train = checked.layout, config.train
    accumulation = train.global_batch_size // (train.micro_batch_size * layout.data_ranks)
    ranks = plural(layout.data_ranks, "data rank")
    step = f"a step: micro-batch {train.micro_batch_size} × {ranks} × accumulation {accumulation}"
    if sizes.steps is not None:
        step += f"; about {sizes.steps:,} steps an epoch"
    experts = checked.anatomy.num_experts
    here = f"all {experts} experts" if layout.ep == 1 else f"{experts // layout.ep} of {experts} experts"
    size = bytes_text(int(run_costs(choice.job, choice.best, None, None, None).checkpoint_bytes))
    comments = {
        ("data", "train"): found.what,
        ("data", "max_length"): found.lengths,
        ("train", "global_batch_size"): step,
        ("train", "activation_checkpointing"): "none | selective | full: less memory, more time",
        ("parallel",): f"a rank holds {f'1/{layout.efsdp} of ' if layout.efsdp > 1 else ''}{here}",
        ("output_dir",): f"started again, it continues; a checkpoint has {size}",
    }
    if not sizes.packed:
        comments["data", "packing"] = "the data are few: each row is a sequence of its own"
    if choice.why_unpacked is not None:
        comments["data", "packing"] = choice.why_unpacked
    if sizes.epochs > 1:
        comments["train", "num_epochs"] = "the data are few"
    return comments


def _without(comments: Mapping[tuple[str, ...], str], overrides: list[str]) -> dict[tuple[str, ...], str]:
    """Return the comments of keys that were not set, and of the sizes of a step."""
    keys = [tuple(override.partition("=")[0].split(".")) for override in overrides]
    said = {key for key in comments if any(key == each[: len(key)] or each == key[: len(each)] for each in keys)}
    return {key: comment for key, comment in comments.items() if key not in said - {("train", "global_batch_size")}}


def _head(config: Config, checked: Checked, path: Path, choice: Choice) -> Iterator[str]:
    """Yield what the file is, what was predicted for it, and what to do with it."""
    devices: Devices = choice.job.devices
    predicted = forecast(config, checked, devices)
    assert predicted.prediction is not None, "a model that is planned has a prediction"
    memory, took = predicted.prediction.peak_memory_bytes or 0, predicted.prediction.step_seconds
    said = f"{memory / GIB:.1f} GiB a rank of {choice.job.budget / GIB:.1f}"
    if took is not None:
        rate = f"{predicted.prediction.tokens_per_second:,.0f} tokens/s"
        said += f", {took:.3g} s a step, {rate}, with full rows and even routing"
    yield f"# expertmesh init: {choice.way}, on {devices}. Predicted:"
    yield f"# {said}{f'; {predicted.warning}' if predicted.warning else ''}."
    yield from (f"# {line}." for reason in choice.passed_over for line in reason.splitlines())
    more = f" on each of {devices.nodes} nodes (docs/launching.md)" if devices.nodes > 1 else ""
    yield f"#   expertmesh check {path} --nproc {devices.count}    # every row, target tokens marked"
    yield f"#   expertmesh train {path} --nproc {devices.per_node}{more}"


def _lines(values: Mapping[str, Any], comments: Mapping[tuple[str, ...], str]) -> Iterator[str]:
    """Yield YAML, a line for each key."""
    for section, value in values.items():
        inside = section in _BLOCKS and isinstance(value, dict)
        if inside:
            yield f"{section}:"
        for key, one in value.items() if inside else [(section, value)]:
            comment = comments.get((section, key) if inside else (section,))
            line = f"{'  ' * inside}{key}: {dump_yaml(one, one_line=True)}"
            yield f"{line}  # {comment}" if comment else line
