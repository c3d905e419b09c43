"""What a result is published with: its card, the push to the hub, and the disk that checkpoints take."""

import json
from pathlib import Path
from unittest import mock

import huggingface_hub
import pytest
import yaml
from safetensors.torch import load_file

from expertmesh.config import Config
from expertmesh.config.errors import InputError
from expertmesh.training.run import train
from expertmesh.training.startup.preflight import preflight
from tests.support.errors import refused
from tests.support.ranks import run_ranks, shared_ranks
from tests.training.tiny_run import run_config, write_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def _pushed(config: Config, fails: str = "") -> tuple[list[tuple[str, object]], str]:
    """Train with a stand-in of the hub that has its own signatures: its calls, and what the run ended with."""
    api = mock.create_autospec(huggingface_hub.HfApi, instance=True)
    if fails:
        getattr(api, fails).side_effect = ConnectionError("the hub is away.\nmore")
    said = ""
    with mock.patch.object(huggingface_hub, "HfApi", return_value=api):
        try:
            train(config)
        except InputError as error:
            said = f"{error.key}: {error}"
    return [(call[0], call[2]) for call in api.method_calls], said


def test_a_finished_run_is_pushed_with_its_card_and_says_what_its_checkpoints_take(
    inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    layers = [{"name": "forward", "status": "pass"}, {"name": "backward", "status": "pass"}]
    (run / "verification.json").write_text(json.dumps({"status": "pass", "layers": layers}))
    options = ["lora.r=4", "checkpoint.every_steps=3", "save.push_to_hub=someone/moe-lora", "train.max_steps=3"]
    ((calls, said),) = run_ranks(_pushed, 1, run_config(inputs, run, *options))
    assert said == ""
    assert [name for name, _ in calls] == ["whoami", "create_repo", "upload_folder"]
    assert calls[1][1] == {"private": True, "exist_ok": True}
    uploaded = dict(calls[2][1])  # type: ignore[call-overload]
    assert (uploaded["repo_id"], uploaded["folder_path"]) == ("someone/moe-lora", run / "adapter")
    card = (run / "adapter" / "README.md").read_text()
    head = yaml.safe_load(card.split("---")[1])
    assert head == {"library_name": "peft", "tags": ["expertmesh", "mixture-of-experts", "sft", "lora"]}
    for line in (
        "# moe-lora",
        "- 3 steps, 0.75 passes over the data",
        "- `expertmesh verify` of this configuration against the unsharded model: pass (forward pass, backward pass)",
        "| `lora.r` | 4 |",
        "| `optim.learning_rate` | 0.01 |",
    ):
        assert line in card.splitlines()
    assert "on `train.jsonl`." in card
    assert str(tmp_path) not in card
    assert str(inputs) not in card
    out = capfd.readouterr().out
    assert "pushed     https://huggingface.co/someone/moe-lora\n" in out
    (disk,) = [line for line in out.splitlines() if line.startswith("disk ")]
    files = (run / "checkpoints" / "step-00000003").glob("*.safetensors")  # not the generators', which plans leave out
    written = sum(tensor.nbytes for file in files for tensor in load_file(file).values())
    size, unit = disk.split()[1:3]
    scale = {"KiB": 2**10, "MiB": 2**20}[unit]
    assert float(size) * scale == pytest.approx(written, abs=0.2 * scale)  # AdamW also keeps the steps of a tensor
    assert " a checkpoint, 2 kept and one being written: " in disk


def test_a_push_that_fails_keeps_the_result_and_a_wrong_log_in_is_refused_before_weights_are_read(
    inputs: Path, tmp_path: Path
) -> None:
    config = run_config(inputs, tmp_path / "run", "save.push_to_hub=someone/moe", "train.max_steps=1")
    ((calls, said),) = shared_ranks(_pushed, 1, config, "whoami")
    assert [name for name, _ in calls] == ["whoami"]
    assert said.startswith(
        "save.hub-refused: save.push_to_hub someone/moe: the hub does not know who asks (the hub is "
    )
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    ((calls, said),) = shared_ranks(_pushed, 1, config, "upload_folder")
    model = tmp_path / "run" / "model"
    assert said == (
        "save.push-failed: save.push_to_hub someone/moe: the hub is away; the run is finished and its result is in "
        f"{model}: push it with hf upload someone/moe {model}"
    )
    assert "not compared with the unsharded model" in (model / "README.md").read_text()
    assert "Fine-tuned from `model`" in (model / "README.md").read_text()
    with refused("run.finished"):
        preflight(config, 1)


def test_a_repository_is_owner_and_name_and_no_checkpoint_takes_no_disk(inputs: Path, tmp_path: Path) -> None:
    with refused("config.wrong-value", naming="save.push_to_hub"):
        run_config(inputs, tmp_path / "run", "save.push_to_hub=moe")
    assert preflight(run_config(inputs, tmp_path / "run"), 1).checkpoint_bytes == 0
    saving = preflight(run_config(inputs, tmp_path / "run", "checkpoint.every_steps=1"), 1)
    # Parameters and two moments in float32.
    assert saving.checkpoint_bytes == 12 * sum(each.numel() for each in saving.model.parameters())
