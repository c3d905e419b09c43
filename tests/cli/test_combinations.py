"""Each pair of the lists in docs/parallelism.md, an option along an axis, is started by the command line as one types
it: two steps give the losses of one process, or the pair is refused by the key that the page names.

A job takes all options of one line of `TOGETHER`. Ranks are forked, as those of srun, and shared by all jobs of as many
ranks; options that leave something behind in a process have ranks of their own. `train.compile` traces with torch's own
"aot_eager", which is the same graph without generated code.
"""

import json
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin
from unittest import mock

import pytest
import torch

from expertmesh.cli.main import main
from expertmesh.config import Config
from expertmesh.config.base import Section
from expertmesh.parallel import compiling
from tests.cli.rank_of_srun import rank_of_srun
from tests.support.one_launch import Launched, one_launch
from tests.support.ranks import LivingRanks, run_ranks, shared_ranks
from tests.training.dpo_by_trl import PAIRS
from tests.training.kto_by_trl import ROWS as LABELLED
from tests.training.tiny_run import ROWS, metrics, run_config, write_inputs

# Ranks, and how they are laid out: rows travel along ep beside each other axis.
AXES = {
    "ep": (2, "parallel.ep=2"),
    "fsdp": (4, "parallel.fsdp=4 parallel.ep=2"),
    "replicate": (4, "parallel.replicate=2 parallel.ep=2"),
    "tp": (2, "parallel.tp=2 parallel.ep=2"),
    "cp": (2, "parallel.cp=2 parallel.ep=2"),
    "pp": (4, "parallel.pp=2 parallel.ep=2"),
}
# Several axes at once.
PLACES: dict[str, tuple[int, str]] = {
    "fsdp": AXES["fsdp"],
    "replicate-tp": (4, "parallel.replicate=2 parallel.tp=2 parallel.ep=2"),
    "cp": AXES["cp"],
    "cp-pp": (4, "parallel.cp=2 parallel.pp=2 parallel.ep=2"),
    "pp": AXES["pp"],
}
ONE_PROCESS = (1, "parallel.ep=1")
# DeepSeek-V3 of two blocks has all that an option may be about, but for these. tp cuts its linear layers where formats
# of 4 bits have the border of a block.
SIZES = {"intermediate_size": 64, "moe_intermediate_size": 64, "v_head_dim": 16}
OTHER_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "moe.aux_loss_coef": ("qwen3_moe", {}),
    "train.compile": ("qwen3_moe", {}),
    "parallel.pp_virtual_stages": ("deepseek_v3", {"num_hidden_layers": 4}),
    "by_layer": ("deepseek_v3", {**SIZES, "num_hidden_layers": 4}),  # two blocks between the first and the last
}
# Compiled code, threads that wait for other nodes, and torch's own switch.
LEAVES_SOMETHING = re.compile(r".*(train\.compile|hierarchical|train\.deterministic)")
# What one process does without: it has nobody to send rows to.
ALONE = ("moe.dispatch=", "parallel.")
PAGE = (Path(__file__).parents[2] / "docs" / "parallelism.md").read_text()


def _table() -> dict[str, dict[str, str]]:
    """By option, as it is typed, what each axis does with it: `yes`, or the key of the refusal."""
    section = PAGE.partition("## Options along each axis\n")[2].partition("\n## ")[0]
    table, axes = dict[str, dict[str, str]](), list[str]()
    for line in section.splitlines():
        if line.startswith("**"):
            axes = re.findall(rf"\b(?:{'|'.join(AXES)})\b", line) or list(AXES)
        elif found := re.fullmatch(r"- `([^`]+)`(?:: `([^`]+)`)?", line):
            table.setdefault(found[1], {}).update(dict.fromkeys(axes, found[2] or "yes"))
    return table


TABLE = _table()
CELLS = [(option, axis, cell) for option, cells in TABLE.items() for axis, cell in cells.items()]
R4, BY_LAYER = "lora={r: 4}", "train.accumulate=by_layer"
# Options that one job takes. With the axes that it has at once, a quarter as many jobs have each pair, which also meets
# others.
TOGETHER: dict[str, list[str]] = {
    "packed": [
        "data.packing=true",
        "train.activation_checkpointing=selective",
        "moe.dispatch=all_to_all",
        "moe.compute=grouped_mm",
        "moe.z_loss_coef=0.01",
        "optim={name: adamw_8bit}",
        "checkpoint={asynchronous: false, every_steps: 1}",
    ],
    "streamed": [
        "data.stream=true",
        "train.activation_checkpointing=full train.checkpoint_layers=[1]",
        "moe.compute=loop",
        "moe.bias_update_rate=0.01",
        "optim={name: muon}",
        "model.attention=sdpa",
    ],
    "float64": [
        "precision={params: float64, compute: float64, reduce: float64}",
        "train.activation_checkpointing=none",
        "train.accumulate=by_micro_batch",
        "moe.router=frozen",
        "optim={name: sgd}",
        "model.attention=eager",
    ],
    "router in bfloat16": [
        "moe.router_dtype=compute precision.compute=bfloat16",
        "objective.name=simpo",
        "train.activation_checkpointing=full",
    ],
    "weights in bfloat16": [
        "optim={stochastic_rounding: true} precision={params: bfloat16, compute: bfloat16}",
        "objective.name=dpo",
    ],
    "reduced in bfloat16": [
        "precision={params: float32, compute: bfloat16, reduce: bfloat16}",
        "train.eval_every_steps=1 eval.samples=1 eval.sample_tokens=3",
    ],
    "aux loss": ["moe.aux_loss_coef=0.01"],
    "lora": [R4, "moe.kernels=torch"],
    "lora on all": [
        "lora={r: 4, dropout: 0.1, targets: [attention, experts, router, shared_experts], use_rslora: true, "
        "init: gaussian}"
    ],
    "float8": [f"{R4} precision.frozen=float8", f"objective.name=dpo {R4}"],
    "nf4": [f"{R4} precision.frozen=nf4"],
    "mxfp4": [f"{R4} precision.frozen=mxfp4"],
    "nvfp4": [f"{R4} precision.frozen=nvfp4"],
    "published": [f"{R4} precision.frozen=as_published"],
    "offload": [f"{R4} precision.frozen=nf4 parallel.offload=experts"],
    "orpo": ["objective.name=orpo lora={r: 4, dropout: 0.1}"],
    "kto": [f"objective.name=kto {R4}"],
    "reward": [f"objective.name=reward {R4}"],
    "distill": [f"objective={{name: distill, teacher: MODEL, kl: reverse}} {R4} precision.frozen=nf4"],
    "compiled": ["train.compile=true"],
    "by node": ["moe.dispatch=hierarchical parallel.ep_across_nodes=true", "train.deterministic=true"],
    "by layer": [BY_LAYER, f"{BY_LAYER} train.round=1 train.keep_inputs=device", f"{BY_LAYER} objective.name=simpo"],
    "by layer from host": [
        f"{BY_LAYER} train.activation_checkpointing=full train.keep_inputs=host",
        f"{BY_LAYER} data.packing=true",
        f"{BY_LAYER} moe.bias_update_rate=0.01",
    ],
    "by layer, lora": [f"{BY_LAYER} train.activation_checkpointing=selective lora={{r: 4, dropout: 0.1}}"],
    "by layer, offload": [
        f"{BY_LAYER} train.keep_inputs=host {R4} precision.frozen=nf4 parallel.offload=experts",
        f"{BY_LAYER} objective.name=dpo {R4}",
    ],
    "by layer, aux loss": [f"{BY_LAYER} moe.aux_loss_coef=0.01"],
    "by layer, compiled": [f"{BY_LAYER} train.compile=true", f"{BY_LAYER} train.deterministic=true"],
    "gpipe": ["parallel.pp_schedule=gpipe"],
    "1f1b": ["parallel.pp_schedule=1f1b"],
    "interleaved": ["parallel.pp_schedule=interleaved_1f1b parallel.pp_virtual_stages=2"],
}


def _words(option: str) -> list[str]:
    """`lora={r: 4} train.compile=true` as two arguments."""
    return re.findall(r"(?:[^\s{\[]|\{.*?\}|\[.*?\])+", option)


@cache
def _inputs(root: Path, option: str) -> Path:
    """Models, plain and quantised, and data for `option`."""
    return _inputs_of(root, next((key for key in OTHER_MODELS if key in option), "all others"))


@cache
def _inputs_of(root: Path, key: str) -> Path:
    family, changes = OTHER_MODELS.get(key, ("deepseek_v3", SIZES))
    inputs = write_inputs(root / f"of {key}", family, **changes)
    write_inputs(inputs / "teacher", family, seed=1, **changes)
    (inputs / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    (inputs / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in LABELLED))
    # Each further length may be traced again, in every rank.
    (inputs / "two lengths.jsonl").write_text("".join(json.dumps(ROWS[n % 2]) + "\n" for n in range(len(ROWS))))
    code = main(["convert", str(inputs / "model"), "--output", str(inputs / "published"), "--dtype", "fp8"])
    assert code == 0
    return inputs


def _arguments(inputs: Path, option: str, axes: str, output: Path) -> list[str]:
    run_config(inputs, output)
    given = [*_words(axes), *_words(option), "train.max_steps=2"]
    if "distill" in option:
        given = [each.replace("teacher: MODEL", f"teacher: {inputs / 'teacher' / 'model'}") for each in given]
    elif "objective" in option:
        given += [f"data.train={inputs / ('rows.jsonl' if 'kto' in option else 'pairs.jsonl')}", "data.max_length=128"]
    if "compile" in option:
        given += [f"data.train={inputs / 'two lengths.jsonl'}"]
    if "eval" in option:
        given += [f"data.eval={inputs / 'train.jsonl'}"]
    if "by_layer" in option:  # two micro-batches on each of four data ranks
        given += ["train.global_batch_size=8", "train.num_epochs=2"]
    if "as_published" in option:
        given += [f"model.name_or_path={inputs / 'published'}"]
    return ["train", f"{output}.yaml", *given]


def _output(inputs: Path, option: str, place: tuple[int, str], apart: bool = False) -> Path:
    return inputs / re.sub(r"\W+", "-", f"{option} {place[1]}{' apart' * apart}")


def _job(inputs: Path, option: str, place: tuple[int, str], apart: bool = False) -> tuple[int, Callable[[], int]]:
    """The number of ranks and what each runs; `apart` in a directory that no shared ranks use."""
    world, axes = place
    output = _output(inputs, option, place, apart)
    return world, partial(rank_of_srun, _arguments(inputs, option, axes, output), str(output), "hierarchical" in option)


def _losses(output: Path, codes: list[int]) -> list[float]:
    said = "".join(Path(f"{output}.{rank}.txt").read_text() for rank in range(len(codes)))
    assert not any(codes), said
    return [row["loss"] for row in metrics(output) if "loss" in row]


@cache
def _trace_once() -> None:
    """Load what tracing needs before ranks are forked, each of which would load it itself."""
    traced = torch.compile(lambda x: (x * 2).sum(), backend="aot_eager", fullgraph=True, dynamic=True)
    traced(torch.ones(3, 4, requires_grad=True)).backward()


@cache
def _train(inputs: Path, option: str, place: tuple[int, str]) -> list[float]:
    """The losses of two steps, in ranks of their own."""
    world, work = _job(inputs, option, place, apart=True)
    if "compile" in option:
        _trace_once()
    compiled = mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager"))
    with compiled, mock.patch.object(compiling, "_probe"):
        codes = run_ranks(work, world)
    return _losses(_output(inputs, option, place, apart=True), codes)


def _alone(option: str) -> str:
    return " ".join(word for word in _words(option) if not word.startswith(ALONE))


def _about(option: str, losses: list[float]) -> Any:
    return pytest.approx(losses, rel=1e-2 if "bfloat16" in option else 1e-4)


def _places(options: list[str]) -> list[str]:
    """The places whose axes train all of the options."""
    trained = [{axis for axis, cell in TABLE[option].items() if cell == "yes"} for option in options]
    common = set.intersection(*trained)
    if common == {"pp"}:
        return ["pp"]
    assert common >= {"fsdp", "replicate", "tp", "cp"}, options
    return ["fsdp", "replicate-tp", "cp-pp" if "pp" in common else "cp"]


JOBS = [(name, place) for name, options in TOGETHER.items() for place in _places(options)]
OPTION = {
    name: " ".join(dict.fromkeys(word for option in options for word in _words(option)))
    for name, options in TOGETHER.items()
}
SHARE_RANKS = [job for job in JOBS if not LEAVES_SOMETHING.match(OPTION[job[0]])]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("combinations")


@pytest.fixture(scope="module")
def train_alone(root: Path) -> Iterator[Callable[[Path, str], list[float]]]:
    """The losses that one process gives with an option; the same process for all of them."""
    options = {OPTION[name] for name, _ in SHARE_RANKS}
    jobs = sorted({(_inputs(root, option), _alone(option)) for option in options})
    works = [_job(*job, ONE_PROCESS)[1] for job in jobs]
    ranks = LivingRanks(works, 1)

    @cache
    def losses(inputs: Path, option: str) -> list[float]:
        nonlocal ranks
        number = jobs.index((inputs, option))
        if not ranks.alive or not ranks.start(number):
            ranks = LivingRanks(works, 1)
            assert ranks.start(number)
        return _losses(_output(inputs, option, ONE_PROCESS), ranks.results())

    yield losses
    ranks.end()


@pytest.mark.slow(why="each option is proven by a test of its own; all refusals stay")
@pytest.mark.parametrize(("name", "place"), SHARE_RANKS)
@one_launch(lambda root, name, place: _job(_inputs(root, OPTION[name]), OPTION[name], PLACES[place]))
def test_options_along_axes_train_by_the_command_line(
    launched: Launched, train_alone: Callable[[Path, str], list[float]], root: Path, name: str, place: str
) -> None:
    option = OPTION[name]
    inputs = _inputs(root, option)
    found = _losses(_output(inputs, option, PLACES[place]), launched())
    assert found == _about(option, train_alone(inputs, _alone(option)))


@pytest.mark.slow(
    why="launches; parallel/test_compiling.py compiles beside each axis, experts/test_dispatch.py has the dispatcher"
)
@pytest.mark.parametrize(("name", "place"), [job for job in JOBS if job not in SHARE_RANKS])
def test_options_that_change_a_process_train_along_axes(root: Path, name: str, place: str) -> None:
    option = OPTION[name]
    inputs = _inputs(root, option)
    assert _train(inputs, option, PLACES[place]) == _about(option, _train(inputs, _alone(option), ONE_PROCESS))


def test_each_pair_of_the_page_is_in_a_job() -> None:
    axes = {place: set(re.findall(rf"\b({'|'.join(AXES)})=", arguments)) for place, (_, arguments) in PLACES.items()}
    found = {(option, axis) for name, place in JOBS for option in TOGETHER[name] for axis in axes[place]}
    assert {cell[:2] for cell in CELLS if cell[2] == "yes"} <= found


@pytest.mark.parametrize(("option", "axis", "key"), [cell for cell in CELLS if cell[2] != "yes"])
def test_what_an_axis_does_not_have_is_refused_before_ranks_start(
    root: Path, capsys: pytest.CaptureFixture[str], option: str, axis: str, key: str
) -> None:
    inputs, (world, axes) = _inputs(root, option), AXES[axis]
    arguments = _arguments(inputs, option, axes, inputs / "refused")
    capsys.readouterr()
    assert main(["--error-format", "json", *arguments, "--nproc", str(world)]) == 2
    out, err = capsys.readouterr()
    assert json.loads(err)["key"] == key
    assert "each of which imports" not in out


def test_a_refusal_of_all_ranks_is_told_by_rank_0(root: Path) -> None:
    inputs, output = _inputs(root, ""), root / "refused"
    assert shared_ranks(rank_of_srun, 2, _arguments(inputs, "parallel.ep=3", "", output), str(output), False) == [2, 2]
    said = [Path(f"{output}.{rank}.txt").read_text() for rank in range(2)]
    assert [text.count("error: rank 0: parallel.ep 3 does not divide") for text in said] == [1, 0]
    assert "error" not in said[1]


def _choices(section: type[Section], prefix: str = "") -> dict[str, set[Any]]:
    """By key, the values of all switches: what is true, and each name but the default."""
    found: dict[str, set[Any]] = {}
    for name, field in section.model_fields.items():
        kinds = [field.annotation, *get_args(field.annotation)]
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)
        if inner is not None:
            found |= _choices(inner, f"{prefix}{name}.")
            continue
        values = {value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)}
        values |= {True, False} if bool in kinds else set()
        found[f"{prefix}{name}"] = {value for value in values if value not in (field.default, "auto", None)}
    return {key: values for key, values in found.items() if values}


# Switches that are not about how ranks compute: of data and weights before, of results and reports after a step.
NOT_OF_AXES = re.compile(
    r"(save|log|schedule|eval|checkpoint|distributed)\..*|data\.(?!packing|stream).*|model\.(trust_|from_config|vision).*"
)
# Named on the page under another key or value, the opposite of what is there, or proven with models of their own.
OTHERWISE = {
    "parallel.ep_across_nodes": {True},
    "lora.lora_bias": {True},  # of layers with a bias: tests/adapters/test_replaced.py
    "data.packing": {False},
    "moe.router_dtype": set(),
    "precision.params": {"float16"},
    "precision.compute": {"float16", "float32"},
    "precision.reduce": {"float16"},
}


def test_the_page_has_every_switch_of_the_configuration() -> None:
    text = "\n".join(TABLE)
    missing = {
        f"{key}={value}"
        for key, values in _choices(Config).items()
        if not NOT_OF_AXES.fullmatch(key)
        for value in values - OTHERWISE.get(key, set())
        if not re.search(rf"\b{key.rpartition('.')[2]}(=|: ){str(value).lower() if value is True else value}\b", text)
    }
    assert not missing
