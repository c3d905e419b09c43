"""What the verbs take on the command line: shared options, and one dataclass for each verb that has many.

Light, so that `--help` and a wrong command line need no torch.
"""

import functools
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ByteSize, TypeAdapter, ValidationError
from typer import Argument, Option

from expertmesh.config.sections import Accumulate, OptimizerName
from expertmesh.verification.options import DEFAULT_TOKENS, LAYERS

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def duration(text: str) -> float:
    """Return the seconds that `text` names: a number, or a number with s, m, h or d (`90s`, `1.5h`)."""
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if matched is None or float(matched[1]) == 0:
        raise ValueError(f"{text!r} is not a length of time; write 90s, 30m, 2h or seconds")
    return float(matched[1]) * _SECONDS[matched[2]]


def step_range(text: str) -> tuple[int, int]:
    """Return the first and the last step in `text`: `3:5`, or `3` for one."""
    matched = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", text.strip())
    first, last = (int(matched[1]), int(matched[2] or matched[1])) if matched is not None else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(f"{text!r} are no steps; write 3:5 for the third to the fifth")
    return first, last


def rank_range(text: str) -> tuple[int, int]:
    """Return the fewest and the most ranks in `text`: `8:32`."""
    matched = re.fullmatch(r"(\d{1,6}):(\d{1,6})", text.strip())
    fewest, most = (int(matched[1]), int(matched[2])) if matched is not None else (0, 0)
    if not 1 <= fewest <= most:
        raise ValueError(f"{text!r} is no range of ranks; write 8:32 for 8 to 32")
    return fewest, most


def size(text: str) -> int:
    """Return the bytes in `text`: a number, or one with KB, MB, GB, TB (powers of 1000) or KiB, ... (of 1024)."""
    try:
        count = TypeAdapter(ByteSize).validate_python(text)
    except ValidationError:
        count = ByteSize(0)
    if count < 1:
        raise ValueError(f"{text!r} is not a size; write 5GB, 500MB, 4GiB or bytes")
    return count


# Options that several verbs share.
N = functools.partial(Option, metavar="N", min=1)
FILE = functools.partial(Option, metavar="FILE")
ConfigFile = Annotated[str, Argument(metavar="CONFIG", help="the run's YAML file")]
Overrides = Annotated[
    list[str] | None, Argument(metavar="KEY=VALUE", help="instead of the file's value, e.g. train.max_steps=10")
]
Model = Annotated[str, Argument(metavar="MODEL", help="hub id or local directory")]
Output = Annotated[str, Option(metavar="DIR", help="new or empty directory")]
MergedDtype = Literal["auto", "bfloat16", "float16", "float32", "as_loaded"]
# As `save_model` takes them; a test compares the two.
WrittenDtype = Literal["auto", "bfloat16", "float16", "float32", "as_loaded", "fp8", "int4", "mxfp4", "nvfp4"]
Frozen = Literal["float8", "nf4", "mxfp4", "nvfp4", "as_published"]
DTYPE = Option(help="of the weights; auto: as in the model's files, bfloat16 if quantised")
SHARD_SIZE = Option(
    metavar="SIZE", parser=size, show_default=False, help="of a weights file: 5GB (default), 500MB, 4GiB or bytes"
)
DEFAULT_SHARD_SIZE = size("5GB")
TrustRemoteCode = Annotated[bool, Option("--trust-remote-code", help="run the model's own code")]


@dataclass(frozen=True, slots=True)
class TrainArguments:
    """The arguments of `expertmesh train`."""

    config: ConfigFile
    overrides: Overrides = None
    nproc: Annotated[
        int | None, N(help="ranks to start on this machine (default: one per accelerator, 2 on a CPU)")
    ] = None
    max_time: Annotated[
        float | None,
        Option(metavar="TIME", parser=duration, help="save and stop (exit 143) after it: 90s, 30m, 2h or seconds"),
    ] = None
    max_restarts: Annotated[
        int, Option(metavar="N", min=0, help="how often to start all local ranks again after one died or hung")
    ] = 0
    audit: Annotated[
        Literal["sampled", "full"],
        Option(help="compare samples of the loaded weights with their files, or every byte, with a hash per expert"),
    ] = "sampled"
    profile: Annotated[
        Any,  # a tuple: typer would take two arguments for it
        Option(metavar="FIRST:LAST", parser=step_range, help="trace these steps of this start on every rank, e.g. 3:5"),
    ] = None
    elastic: Annotated[
        Any,  # as above
        Option(
            metavar="MIN:MAX",
            parser=rank_range,
            help="under torchrun --nnodes MIN:MAX: go on with as many ranks as are left, at a layout that fits them",
        ),
    ] = None
    quiet: Annotated[bool, Option("--quiet", "-q", help="print warnings alone: log.level=warning")] = False


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options of `expertmesh plan`: layouts for a model and devices, or a placement, which needs neither."""

    model: Annotated[str, Argument(metavar="MODEL", help="hub id or local directory", show_default=False)] = ""
    devices: Annotated[
        str, Option(metavar="DEVICES", help="nodes x devices and kind: '2x8 h200', '8 h100'", show_default=False)
    ] = ""
    seq_len: Annotated[int | None, N(min=2, help="tokens of a sequence (default: 4096, or the model's own)")] = None
    global_batch_size: Annotated[
        int | None, N(help="sequences of a step (default: 64, or the next multiple of the devices)")
    ] = None
    lora: Annotated[list[str] | None, Option(metavar="KEY=VALUE", help="adapters: r=16; again for more keys")] = None
    params: Annotated[Literal["float32", "bfloat16"], Option(help="dtype of the parameters that train")] = "float32"
    optimizer: Annotated[OptimizerName, Option(help="what updates them")] = "adamw"
    accumulate: Annotated[Accumulate, Option(help="order of the micro-batches of a step")] = "auto"
    compute: Annotated[Literal["float32", "bfloat16"], Option(help="dtype of forward and backward")] = "bfloat16"
    frozen: Annotated[Frozen | None, Option(help="how weights that adapters freeze stay in memory")] = None
    offload: Annotated[Literal["none", "experts"], Option(help="frozen experts in host memory, streamed")] = "none"
    no_packing: Annotated[bool, Option("--no-packing", help="one sample per sequence, so no mask between them")] = False
    goal: Annotated[Literal["speed", "memory"], Option(help="what to rank by")] = "speed"
    top: Annotated[int, N(help="layouts to show")] = 8
    imbalance: Annotated[float, Option(metavar="X", help="rows of the busiest expert rank over the mean")] = 1.0
    load: Annotated[
        str | None, Option(metavar="RUN_OR_FILE", help="instead: measured, in a run's expert_load.json")
    ] = None
    hardware: Annotated[str | None, FILE(help="YAML with more devices, or other numbers for ours")] = None
    yaml: Annotated[bool, Option("--yaml", help="print a configuration for train of the best layout")] = False
    json: Annotated[bool, Option("--json", help="print everything as JSON")] = False
    simulate: Annotated[bool, Option("--simulate", help="run one rank of the best layout on fake tensors")] = False
    data: Annotated[str, Option(metavar="PATH", help="data.train of --yaml")] = "train.jsonl"
    placement: Annotated[
        str | None, Option(metavar="RUN_OR_FILE", help="write moe.placement by that load, without MODEL")
    ] = None
    ep: Annotated[int | None, N(help="of --placement")] = None
    replicas: Annotated[int | None, N(help="copies on each EP rank, of --placement")] = None
    output: Annotated[str | None, FILE(help="of --placement (default: placement.json)")] = None
    trust_remote_code: TrustRemoteCode = False


@dataclass(frozen=True, slots=True)
class InitOptions:
    """The options of `expertmesh init`; `lora` None takes full fine-tuning if it fits."""

    model: Model
    data: Annotated[str, Option(metavar="PATH", help="file, directory or hub id of the data to train on")]
    overrides: Annotated[
        list[str] | None, Argument(metavar="KEY=VALUE", help="what the file is to say, e.g. parallel.ep=4")
    ] = None
    devices: Annotated[
        str | None, Option(metavar="DEVICES", help="as of plan, e.g. 8xh100 (default: those of this machine)")
    ] = None
    lora: Annotated[bool | None, Option("--lora/--full", help="adapters or all weights (default: what fits)")] = None
    max_length: Annotated[int | None, N(min=2, help="tokens of a sequence (default: 4096, or the model's own)")] = None
    output: Annotated[str | None, FILE(help="file to write (default: the model's name with .yaml)")] = None
    trust_remote_code: TrustRemoteCode = False


@dataclass(frozen=True, slots=True)
class VerifyArguments:
    """The arguments of `expertmesh verify`.

    `what` is a configuration, a checkpoint or a run; all others but `json` are for a proof.
    """

    what: Annotated[
        str | None,
        Argument(
            metavar="CONFIG_OR_CHECKPOINT",
            help="the YAML file of a run, to prove its sharded job; or a checkpoint directory, or that of a run",
        ),
    ] = None
    overrides: Overrides = None
    json: Annotated[str | None, FILE(help="where to write the report (of a proof: default output_dir)")] = None
    model: Annotated[str | None, Option(metavar="DIR", help="proof: a model on random token ids, for CONFIG")] = None
    parallel: Annotated[str | None, Option(metavar='"ep=4 fsdp=4"', help="proof: the layout, for --model")] = None
    nproc: Annotated[int | None, N(help="proof: local ranks to start; not under torchrun")] = None
    layers: Annotated[int | None, N(help="proof: the model's first N layers alone")] = None
    tokens: Annotated[int | None, N(help=f"proof: of a step over all ranks (default: {DEFAULT_TOKENS:,})")] = None
    only: Annotated[str | None, Option(metavar="LAYER,...", help=f"proof: some of {', '.join(LAYERS)}")] = None
    self_test: Annotated[bool, Option("--self-test", help="proof: plant known bugs, which must be caught")] = False
