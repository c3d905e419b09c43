"""`expertmesh init MODEL --data FILE`: a configuration of a dozen lines that fits a model, its data and these devices.

For someone's first run. `plan` chooses layout, micro-batch and activation checkpointing, for full fine-tuning if that
fits, else for adapters, at last with experts in 4 bits; each choice stands in the file with its reason. Reads
config.json, the tokenizer and the first rows of the data; never overwrites a file.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from expertmesh.cli.options import InitOptions
from expertmesh.cli.plan.choose import Choice, choose
from expertmesh.cli.plan.first_rows import first_rows
from expertmesh.cli.plan.read import usual_length
from expertmesh.cli.printing import bytes_text
from expertmesh.config import ModelConfig
from expertmesh.config.errors import InputError
from expertmesh.config.files import make_config
from expertmesh.config.yaml_text import dump_yaml, parse_yaml
from expertmesh.data import load_tokenizer
from expertmesh.planning.search import GIB, Candidate, Job, run_costs
from expertmesh.weights.meta_model import read_model_config


def run(options: InitOptions) -> int:
    """Write the file and print it; returns 0. `InputError` for what `train` would refuse, and when nothing fits."""
    name = options.model.rstrip("/").rpartition("/")[2]
    path = Path(options.output or f"{name}.yaml")
    if path.exists():
        raise _refuse_existing(path)
    config, _ = read_model_config(options.model, trust_remote_code=options.trust_remote_code, weights=False)
    model = ModelConfig(name_or_path=options.model, trust_remote_code=options.trust_remote_code)
    length = options.max_length or usual_length(config)
    found = first_rows(options.data, load_tokenizer(model), length, int(config.get_text_config().vocab_size))
    choice = choose(options, config, length)
    text = "\n".join(_lines(options, path, choice, found)) + "\n"
    make_config(parse_yaml(text, str(path)).value, source=str(path))  # what is wrong with it is a bug of ours
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise _refuse_existing(path) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})", key="cli.unwritable-report") from error
    sys.stdout.write(text)
    print(f"wrote {path}")
    return 0


def _refuse_existing(path: Path) -> InputError:
    return InputError(f"{path} exists already and stays as it is; choose another --output", key="init.exists")


def _lines(options: InitOptions, path: Path, choice: Choice, data: tuple[str, str]) -> Iterator[str]:
    """The file: every line is a choice, and its comment the reason."""
    job, best, devices = choice.job, choice.best, choice.job.devices
    batch, layout = best.workload.batch, best.layout
    ranks = f"--nproc {devices.per_node}"
    more = f" on each of {devices.nodes} nodes (docs/launching.md)" if devices.nodes > 1 else ""
    yield f"# expertmesh init: {choice.way}, on {devices}. Predicted:"
    took = f"{best.speed.seconds:.3g} s a step, {best.tokens_per_second:,.0f} tokens/s"
    took += ", with full rows and even routing"
    yield f"# {best.memory.total / GIB:.1f} GiB a rank of {job.budget / GIB:.1f}, {took}."
    yield from (f"# {line}." for reason in choice.passed_over for line in reason.splitlines())
    yield f"#   expertmesh check {path} --nproc {devices.count}    # every row, target tokens marked"
    yield f"#   expertmesh train {path} {ranks}{more}"
    yield "model:"
    yield f"  {_pair('name_or_path', options.model)}"
    if options.trust_remote_code:
        yield "  trust_remote_code: true"
    yield from _precision(choice)
    yield "data:"
    yield f"  train: [{{{_pair('path', options.data, flow=True)}}}]  # {data[0]}"
    yield f"  max_length: {job.model.length}  # {data[1]}"
    if choice.why_unpacked is not None:
        yield f"  packing: false  # {choice.why_unpacked}"
    if choice.way.targets:
        yield f"lora: {{r: 16, alpha: 32, targets: [{', '.join(choice.way.targets)}]}}"
    yield f"optim: {{learning_rate: {'1.0e-4' if choice.way.targets else '1.0e-5'}}}"
    yield "train:"
    made_of = f"micro-batch {batch.rows} × {layout.data_ranks} data rank{'s' * (layout.data_ranks > 1)}"
    yield f"  global_batch_size: {job.global_batch_size}  # a step: {made_of} × accumulation {batch.accumulation}"
    yield f"  micro_batch_size: {batch.rows}"
    yield f"  activation_checkpointing: {best.workload.mode}  # none | selective | full: less memory, more time"
    yield "  num_epochs: 1"
    axes = {axis: layout.size(axis) for axis in ("ep", "fsdp", "replicate", "tp", "cp", "pp")}
    sizes = ", ".join(f"{axis}: {size}" for axis, size in axes.items() if size > 1 or axis in ("ep", "fsdp"))
    yield f"parallel: {{{sizes}}}  # {_experts(job, best)}"
    checkpoint = bytes_text(int(run_costs(job, best, None, None, None).checkpoint_bytes))
    yield _pair("output_dir", f"runs/{path.stem}") + f"  # started again, it continues; a checkpoint has {checkpoint}"


def _precision(choice: Choice) -> Iterator[str]:
    compute, frozen = choice.job.model.precision.compute, choice.way.frozen
    values = ([f"compute: {compute}"] if compute != "bfloat16" else []) + ([f"frozen: {frozen}"] if frozen else [])
    if values:
        yield f"precision: {{{', '.join(values)}}}"


def _experts(job: Job, best: Candidate) -> str:
    experts, layout = job.model.anatomy.num_experts, best.layout
    here = f"all {experts} experts" if layout.ep == 1 else f"{experts // layout.ep} of {experts} experts"
    return f"a rank holds {f'1/{layout.efsdp} of ' if layout.efsdp > 1 else ''}{here}"


def _pair(key: str, value: str, *, flow: bool = False) -> str:
    """`key: value` as YAML, in quotes where it needs them; `flow`: also between braces."""
    if flow and any(mark in value for mark in ",[]{}"):
        return f"{key}: '{value.replace(chr(39), chr(39) * 2)}'"
    return dump_yaml({key: value}).rstrip("\n")
