"""Trackers beside metrics.jsonl: what each is told, that a resumed run goes on in the same one, and what cannot be.

wandb, trackio and MLflow are stand-ins that record calls; their parameters are compared with the library's own where it
is installed.
"""

import importlib.util
import inspect
import json
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from expertmesh.config import Config, load_config
from expertmesh.io.terminal import print_log
from expertmesh.training.reporting.metrics import tokens_are_due
from expertmesh.training.reporting.trackers import TRACKERS_FILE, Trackers, figures_of, heat_map, open_trackers
from expertmesh.training.startup.packages import refuse_missing_packages
from tests.config.minimal import write
from tests.support.errors import refused

LOAD = [{"max_over_mean": 2.0, "entropy": 0.9, "dead": 1}, {"max_over_mean": 3.0, "entropy": 0.7, "dead": 2}]
STEP = {"step": 1, "loss": 2.5, "grad_norm": float("nan"), "expert_load": LOAD, "expert_tokens": [[4, 0], [2, 2]]}
FIGURES = dict(figures_of(STEP))
SAMPLES = [{"set": "", "source": "a.jsonl:1", "prompt": "# 1 + 1?", "answer": "2\n\n**two**", "expected": ""}]
# Of what is called in each library, the parameters that are used.
PARAMETERS = {
    "wandb": {
        "init": ["project", "name", "id", "resume", "dir", "config", "allow_val_change"],
        "Image": ["data_or_path"],
        "Table": ["columns", "data"],
        "Run.define_metric": ["name", "step_metric"],
        "Run.log": ["data"],
        "Run.finish": ["exit_code"],
    },
    "trackio": {
        "init": ["project", "name", "config", "resume", "embed"],
        "Image": ["value"],
        "Markdown": ["text"],
        "Run.log": ["metrics", "step"],
        "Run.finish": [],
    },
    "mlflow": {
        "set_experiment": ["experiment_name"],
        "start_run": ["run_id", "run_name"],
        "log_params": ["params"],
        "log_metrics": ["metrics", "step"],
        "log_image": ["image", "key", "step"],
        "log_text": ["text", "artifact_file"],
        "end_run": ["status"],
    },
}


def stand_in(monkeypatch: pytest.MonkeyPatch, library: str) -> list[tuple[str, dict[str, Any]]]:
    """Put a module in the library's place that has what PARAMETERS name; returns the calls as they come in."""
    calls: list[tuple[str, dict[str, Any]]] = []
    module, run = ModuleType(library), SimpleNamespace(info=SimpleNamespace(run_id="id-of-mlflow"))

    def recorded(name: str, parameters: list[str]) -> Callable[..., Any]:
        kinds = [inspect.Parameter(each, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None) for each in parameters]

        def call(*arguments: Any, **named: Any) -> Any:
            calls.append((name, inspect.Signature(kinds).bind(*arguments, **named).arguments))
            return run if name in ("init", "start_run") else name

        return call

    for name, parameters in PARAMETERS[library].items():
        setattr(run if name.startswith("Run.") else module, name.removeprefix("Run."), recorded(name, parameters))
    module.__spec__ = ModuleSpec(library, None, origin="stand-in")
    monkeypatch.setitem(sys.modules, library, module)
    return calls


def _config(directory: Path, *trackers: str) -> Config:
    (directory / "run").mkdir(exist_ok=True)
    overrides = [f"output_dir={directory / 'run'}", f"log.report_to=[{', '.join(trackers)}]"]
    return load_config(write(directory), overrides)


def _two_starts(config: Config) -> None:
    first = open_trackers(config, 0)
    first.write(STEP)
    first.write({"step": 1, "eval_loss": 2.25, "eval_samples": SAMPLES})
    first.close()
    again = open_trackers(config, 1)
    again.write({"step": 2, "loss": 2.0})
    again.close(failed=True)


def test_figures_are_the_finite_numbers_of_a_row_and_the_worst_of_all_layers() -> None:
    assert FIGURES["loss"] == 2.5
    assert "grad_norm" not in FIGURES
    assert "step" not in FIGURES
    worst = [FIGURES[f"expert_load/{name}"] for name in ("max_over_mean/worst", "entropy/worst", "dead/all")]
    assert worst == [3.0, 0.7, 3]
    assert FIGURES["expert_load/entropy/0"] == 0.9
    assert not [name for name in FIGURES if "ranks" in name]
    ranks = dict(figures_of({"expert_load": [layer | {"ranks_max_over_mean": 1 + layer["dead"]} for layer in LOAD]}))
    assert [ranks[f"expert_load/ranks_max_over_mean/{name}"] for name in ("0", "1", "worst")] == [2, 3, 3]
    picture = heat_map([[4, 0], [2, 2], [0, 0]])
    assert picture.shape == (18, 12, 3)
    assert picture[::6, ::6, 0].tolist() == [[127, 0], [63, 63], [0, 0]]
    due = [step for step in range(10, 1001, 10) if tokens_are_due(step, 10, 1000)]
    assert len(due) == 100
    assert [step for step in range(1, 8) if tokens_are_due(step, 1, 7)] == [1, 2, 3, 4, 5, 6, 7]
    assert [step for step in (90, 180, 270, 350) if tokens_are_due(step, 90, 350)] == [90, 180, 270, 350]


def test_tensorboard_has_figures_heat_map_and_configuration(tmp_path: Path) -> None:
    _two_starts(_config(tmp_path, "tensorboard"))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert {event.step: event.value for event in events.Scalars("loss")} == {1: 2.5, 2: 2.0}
    assert events.Scalars("eval_loss")[0].value == 2.25
    assert set(FIGURES) <= set(events.Tags()["scalars"])
    assert (events.Images("expert_tokens")[0].width, events.Images("expert_tokens")[0].height) == (12, 12)
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "model.name_or_path: some/model" in text
    (samples,) = events.Tensors("eval_samples/text_summary")
    shown = samples.tensor_proto.string_val[0].decode()
    assert (samples.step, shown.count("    # 1 + 1?"), shown.count("    **two**")) == (1, 1, 1)


def test_wandb_goes_on_in_the_same_run_by_our_own_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in(monkeypatch, "wandb")
    monkeypatch.setenv("WANDB_PROJECT", "of the environment")
    config = _config(tmp_path, "wandb")
    _two_starts(config)
    first, again = (given for name, given in calls if name == "init")
    assert (first["project"], first["name"], first["resume"]) == ("of the environment", "run", "allow")
    assert first["config"] == config.model_dump(mode="json")
    assert first["id"] == again["id"] == json.loads((tmp_path / "run" / TRACKERS_FILE).read_text())["names"]["wandb"]
    assert ("Run.define_metric", {"name": "*", "step_metric": "step"}) in calls
    rows = [given["data"] for name, given in calls if name == "Run.log"]
    assert rows == [
        {"step": 1, **FIGURES, "expert_tokens": "Image"},
        {"step": 1, "eval_loss": 2.25},
        {"step": 1, "eval_samples": "Table"},
        {"step": 2, "loss": 2.0},
    ]
    (table,) = (given for name, given in calls if name == "Table")
    assert dict(zip(table["columns"], table["data"][0], strict=True)) == SAMPLES[0]
    assert [given["exit_code"] for name, given in calls if name == "Run.finish"] == [0, 1]


def test_trackio_goes_on_in_the_run_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in(monkeypatch, "trackio")
    _two_starts(_config(tmp_path, "trackio"))
    first, again = (given for name, given in calls if name == "init")
    assert (first["project"], first["resume"]) == ("expertmesh", "allow")
    assert first["name"].startswith("run-")
    assert first["name"] == again["name"]
    rows = [(given["step"], given["metrics"]) for name, given in calls if name == "Run.log"]
    assert rows == [
        (1, {**FIGURES, "expert_tokens": "Image"}),
        (1, {"eval_loss": 2.25}),
        (1, {"eval_samples": "Markdown"}),
        (2, {"loss": 2.0}),
    ]
    assert calls[-1] == ("Run.finish", {})


def test_mlflow_goes_on_in_the_same_run_and_has_the_configuration_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = stand_in(monkeypatch, "mlflow")
    _two_starts(_config(tmp_path, "mlflow"))
    assert [given for name, given in calls if name == "start_run"] == [
        {"run_id": None, "run_name": "run"},
        {"run_id": "id-of-mlflow", "run_name": None},
    ]
    parameters = [given["params"] for name, given in calls if name == "log_params"]
    assert all(len(each) <= 100 for each in parameters)
    assert parameters[0]["model.name_or_path"] == "some/model"
    assert [given["step"] for name, given in calls if name == "log_metrics"] == [1, 1, 2]
    assert [given["key"] for name, given in calls if name == "log_image"] == ["expert_tokens"]
    (text,) = (given for name, given in calls if name == "log_text")
    assert text["artifact_file"] == "eval_samples/step-00000001.md"
    assert "    # 1 + 1?\n" in text["text"]
    assert [given["status"] for name, given in calls if name == "end_run"] == ["FINISHED", "FAILED"]


@pytest.mark.parametrize("library", PARAMETERS)
def test_the_libraries_have_what_is_called(library: str) -> None:
    module = pytest.importorskip(library, reason=f"{library} is not installed")
    run_class = {"wandb": "wandb.Run", "trackio": "trackio.Run"}.get(library, "")
    for name, parameters in PARAMETERS[library].items():
        owner = getattr(module, run_class.partition(".")[2]) if name.startswith("Run.") else module
        real = inspect.signature(getattr(owner, name.removeprefix("Run."))).parameters
        assert set(parameters) <= set(real), name


def test_a_new_run_in_the_same_directory_is_a_new_one_for_trackers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = stand_in(monkeypatch, "wandb")
    for _ in range(2):
        open_trackers(_config(tmp_path, "wandb"), 0).close()
    first, second = (given["id"] for name, given in calls if name == "init")
    assert first != second


def test_a_tracker_that_fails_is_said_once_and_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken:
        known_as = "broken"

        def log(self, *arguments: Any) -> None:
            raise ConnectionError("the server is away.\nmore")

    print_log("warning")
    trackers = Trackers({"mlflow": Broken()})  # type: ignore[dict-item]
    for _ in range(2):
        trackers.write(STEP)
    trackers.close()
    assert capsys.readouterr().out == (
        "warning: mlflow failed (the server is away); this start reports nothing more to it, and metrics.jsonl has "
        "every row\n"
    )


def test_a_tracker_that_cannot_be_opened_is_refused_and_the_others_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = stand_in(monkeypatch, "wandb")
    stand_in(monkeypatch, "mlflow")

    def refuse(**options: Any) -> None:
        raise RuntimeError("no server answers at http://127.0.0.1:1")

    monkeypatch.setattr(sys.modules["mlflow"], "start_run", refuse)
    with refused("log.tracker-refused", naming="mlflow cannot be opened: no server answers at http://127.0.0.1:1; "):
        open_trackers(_config(tmp_path, "wandb", "mlflow"), 0)
    assert wandb[-1] == ("Run.finish", {"exit_code": 1})


def test_a_missing_package_is_refused_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    config = _config(tmp_path, "wandb")
    # As a directory `wandb` of an earlier run in the working directory looks.
    empty = importlib.util.spec_from_loader("wandb", loader=None, is_package=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: empty if name == "wandb" else real(name))
    sentence = "wandb needs the wandb package; pip install 'expertmesh[wandb]', or leave wandb out"
    with refused("install.missing-package", naming=sentence):
        refuse_missing_packages(config)
