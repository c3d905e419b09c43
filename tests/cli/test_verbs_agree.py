"""What `train` refuses or warns of before it reads weights, `check` and `verify` say in the same words, and so do
`inspect` and `plan` where it is about the model: all of them ask the same functions. `check` goes on where it is about
this machine or output_dir alone.
"""

import importlib.util
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
from transformers.models.inkling2 import modeling_inkling2

from expertmesh.cli import inspect, plan
from expertmesh.cli.data import run_check
from expertmesh.cli.main import main
from expertmesh.cli.options import PlanOptions
from expertmesh.config import Config, ModelConfig, load_config
from expertmesh.config.errors import InputError
from expertmesh.data import load_tokenizer
from expertmesh.data.sources import read_source
from expertmesh.io.hub import hub_mend
from expertmesh.planning import forecast as planner
from expertmesh.training.startup.preflight import preflight
from expertmesh.verification.options import VerifyOptions
from expertmesh.verification.setup import set_up
from tests.families.tiny import random_model
from tests.support.errors import refused
from tests.training.tiny_run import run_config, write_inputs

BF16 = "precision={params: float32, compute: bfloat16}"


def _without(package: str) -> Callable[[pytest.MonkeyPatch, Path], None]:
    def remove(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        real = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: real(name) if name != package else None)

    return remove


def _full_disk(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=10**12, used=10**12, free=1000))


def _quantised(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    file = root / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": {"quant_method": "gptq"}}))


def _no_tokenizer(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    (root / "model" / "tokenizer.json").unlink()


def _something_in_output_dir(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    (root / "run").mkdir()
    (root / "run" / "notes.txt").touch()


@dataclass(frozen=True)
class Case:
    """Something that cannot be: a configuration, and what is wrong with the model or the machine."""

    sentence: str
    overrides: tuple[str, ...] = ()
    family: str = "qwen3_moe"
    prepare: Callable[[pytest.MonkeyPatch, Path], None] | None = None
    verbs: tuple[str, ...] = ("train", "check", "verify")
    ranks: int = 1
    here: bool = False
    """Another machine or output_dir would do, so `check` notes it."""


def _mixing(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """A family that carries state along the sequence, in a way that samples cannot be kept apart."""
    residual, own = modeling_inkling2.Inkling2BlockAttentionResidual, random_model("Inkling2ForCausalLM", "inkling2")
    forward = residual.forward
    own.save_pretrained(root / "model")
    monkeypatch.setattr(residual, "forward", lambda self, block_states, x: forward(self, block_states, x.cumsum(1)))


CASES = {
    "packing of a family that mixes samples": Case(
        "data.packing: inkling2_text ", ("data.packing=true",), prepare=_mixing, verbs=("train", "check", "verify")
    ),
    "quantised files": Case(
        "weights are quantised by 'gptq', which is not supported",
        prepare=_quantised,
        verbs=("train", "check", "verify", "inspect", "plan"),
    ),
    "a tracker that is not installed": Case(
        "log.report_to: tensorboard needs the tensorboard package",
        ("log.report_to=[tensorboard]",),
        prepare=_without("tensorboard"),
        here=True,
    ),
    "flash attention that is not installed": Case(
        "model.attention: flash_attention_2 needs the flash-attn package",
        ("model.attention=flash_attention_2", BF16),
        prepare=_without("flash_attn"),
        here=True,
    ),
    "a full disk": Case("the disk has 1,000 bytes free, ", prepare=_full_disk, here=True),
    "rows longer than the model's positions": Case(
        "max_position_embeddings 128", ("data.max_length=129",), verbs=("train", "check", "verify", "plan")
    ),
    "a batch that data ranks cannot share": Case(
        "train.global_batch_size 3 is not a multiple", ("train.global_batch_size=3",), ranks=2
    ),
    "an ep that does not divide the ranks": Case("parallel.ep 3 does not divide", ("parallel.ep=3",), ranks=2),
    "layers on stages": Case(
        "train.accumulate: by_layer: it needs an uncut model", ("train.accumulate=by_layer", "parallel.pp=2"), ranks=2
    ),
    "offload of what is not packed": Case("parallel.offload: experts: no experts", ("parallel.offload=experts",)),
    "a backend that cannot run": Case(
        "moe.compute: grouped_mm cannot run",
        ("moe.compute=grouped_mm", "precision={params: float64, compute: float64, reduce: float64}"),
    ),
    "kernels for a GPU on a CPU": Case(
        "moe.kernels: triton cannot be used here: there is no GPU", ("moe.kernels=triton",), here=True
    ),
    "a library for GPUs on CPUs": Case(
        "moe.dispatch: deepep cannot be used here: there is no GPU", ("moe.dispatch=deepep", BF16), ranks=2, here=True
    ),
    "a library that has no kernels for it": Case(
        "moe.dispatch: deepep cannot be used here: its rows are bfloat16", ("moe.dispatch=deepep",), ranks=2
    ),
    "no tokenizer": Case("the tokenizer of ", prepare=_no_tokenizer),
    "a file in output_dir": Case(
        "is not empty and holds no run of ours", prepare=_something_in_output_dir, verbs=("train", "check"), here=True
    ),
}


def _verbs(config: Config, root: Path, ranks: int = 1) -> dict[str, Callable[[], object]]:
    length = config.data.max_length
    options = PlanOptions(model=str(root / "model"), devices="1 h200", seq_len=length, global_batch_size=4, yaml=True)
    return {
        "train": lambda: preflight(config, ranks),
        "check": lambda: run_check(config, nproc=ranks),
        "verify": lambda: set_up(config, VerifyOptions(), ranks),
        "inspect": lambda: inspect.run(str(root / "model")),
        "plan": lambda: plan.run(options),
    }


@pytest.mark.parametrize("name", CASES)
def test_every_verb_gives_the_same_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    case = CASES[name]
    write_inputs(tmp_path, case.family)
    try:
        config = run_config(tmp_path, tmp_path / "run", *case.overrides)
    except InputError:
        pytest.fail("the configuration alone is refused; that says nothing about the verbs")
    if case.prepare is not None:
        case.prepare(monkeypatch, tmp_path)
    said = {}
    for verb, run in _verbs(config, tmp_path, case.ranks).items():
        if verb not in case.verbs:
            continue
        if verb == "check" and case.here:
            assert run() == 0
            *_, said[verb] = capsys.readouterr().out.splitlines()
            said[verb] = said[verb].removeprefix("note: train would stop here: ")
        else:
            with pytest.raises(InputError) as caught:
                run()
            said[verb] = str(caught.value)
    assert all(case.sentence in sentence for sentence in said.values()), said
    assert len({said[verb] for verb in ("train", "check", "verify") if verb in said}) == 1, said
    if case.here:  # nor does it hide what is wrong with the configuration
        with refused("layout.ep-divides-ranks", naming="parallel.ep 3"):
            run_check(run_config(tmp_path, tmp_path / "run", *case.overrides, "parallel.ep=3"), nproc=2)
        assert "\nsample " in capsys.readouterr().out


def test_nothing_is_refused_where_nothing_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_inputs(tmp_path)
    for run in _verbs(run_config(tmp_path, tmp_path / "run", BF16), tmp_path).values():
        run()


@pytest.mark.slow(why="one family")
def test_a_plan_for_a_family_that_mixes_packed_samples_can_be_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_inputs(tmp_path)
    _mixing(monkeypatch, tmp_path)
    _verbs(run_config(tmp_path, tmp_path / "run"), tmp_path)["plan"]()
    out = capsys.readouterr().out
    assert yaml.safe_load(out)["data"]["packing"] is False
    assert "# data.packing is off: inkling2_text " in out
    preflight(run_config(tmp_path, tmp_path / "run", "data.packing=false"), 1)


def test_memory_that_may_run_out_is_said_in_the_same_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_inputs(tmp_path)
    monkeypatch.setattr(planner, "host_memory", lambda: 1e5)
    config = run_config(tmp_path, tmp_path / "run")
    in_train = planner.forecast(config, preflight(config, 1))
    assert in_train.warning is not None
    assert in_train.warning.endswith("so this may run out of memory")
    monkeypatch.setattr("expertmesh.cli.data.job_size", lambda: (1, 1))
    run_check(config)
    assert f"predicted  {in_train.line}\n" in capsys.readouterr().out
    assert in_train.warning in set_up(config, VerifyOptions(), 1).notes


def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def _unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, **options: object) -> None:
        raise LocalEntryNotFoundError("Got: ConnectError: no route") from OSError("no route")

    monkeypatch.setattr("expertmesh.weights.meta_model.snapshot_download", refuse)


@pytest.mark.parametrize(("network", "said"), [(_offline, "HF_HUB_OFFLINE is set"), (_unreachable, "the network is")])
def test_every_verb_says_that_the_hub_was_not_asked_where_it_was_not(
    network: Callable[[pytest.MonkeyPatch], None],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    network(monkeypatch)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    adapter = {
        "peft_type": "LORA",
        "base_model_name_or_path": "org/model",
        "r": 8,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
    }
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
    (tmp_path / "adapter" / "adapter_model.safetensors").touch()
    data, config = str(tmp_path / "a.jsonl"), tmp_path / "run.yaml"
    values = {"model": {"name_or_path": "org/model"}, "data": {"train": [{"path": data}]}}
    config.write_text(yaml.safe_dump({**values, "output_dir": str(tmp_path / "run")}))
    out = ["--output", str(tmp_path / "out")]
    for words in (
        ["plan", "org/model", "--devices", "1 cpu"],
        ["inspect", "org/model"],
        ["init", "org/model", "--data", data, "--devices", "1 cpu"],
        ["check", str(config)],
        ["prepare", str(config)],
        ["train", str(config), "--nproc", "1"],
        ["convert", "org/model", *out],
        ["merge", str(tmp_path / "adapter"), *out],
    ):
        assert main(words) == 2, words
        told = capsys.readouterr().err
        assert said in told, words
        assert "a config.json alone is enough" in told
        assert "correct the name" not in told
    with refused("model.not-found", naming=said):  # as the ranks of `verify` do
        set_up(load_config(config), VerifyOptions(), 1)


def test_what_the_hub_answers_is_no_fault_of_the_network() -> None:
    def answered(kind: type[HfHubHTTPError], status: int) -> HfHubHTTPError:
        return kind("said so", response=SimpleNamespace(status_code=status, headers={}, request=None))  # type: ignore[arg-type]

    for error, mend in (
        (answered(RepositoryNotFoundError, 404), "correct the name"),
        (answered(GatedRepoError, 403), "accept the conditions on its page on the hub, and set HF_TOKEN"),
        (answered(HfHubHTTPError, 503), "the hub was not reached, so the network is the cause"),
        (ValueError("not a name"), "correct the name"),
        (TimeoutError("slow"), "connect, or name a directory"),
    ):
        assert mend in hub_mend(error, "name a directory", "correct the name")


def test_data_and_tokenizers_of_the_hub_are_not_renamed_for_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    _offline(monkeypatch)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with refused("data.not-found", naming="HF_HUB_OFFLINE is set"):
        list(read_source("org/data"))
    with refused("tokenizer.not-loaded", naming="HF_HUB_OFFLINE is set"):
        load_tokenizer(ModelConfig(name_or_path="org/model"))
