"""From file and overrides to `Config` and back: equality, positions of problems, and a light import."""

import subprocess
import sys
from pathlib import Path

import pytest

from expertmesh.config import Config, InputError, dump_config, load_config
from tests.config.minimal import write
from tests.support.errors import refused

DESIGN = """\
model: {name_or_path: Qwen/Qwen3-30B-A3B, revision: "12e4567", trust_remote_code: false, attention: auto}
precision: {params: float32, compute: bfloat16, reduce: float32}
data:
  train: [{path: train.jsonl, format: auto}, {path: dir, format: messages}]
  eval: [{path: eval.jsonl}]
  max_length: 4096
  on_overlong: cut
  on_error: stop
  packing: true
  loss_on: assistant
  shuffle: true
lora: null
optim: {name: adamw, learning_rate: 1e-5, weight_decay: 0, betas: [0.9, 0.95], max_grad_norm: null}
schedule: {name: cosine, warmup_ratio: 0.03}
train: {global_batch_size: 64, micro_batch_size: 2, num_epochs: 1, max_steps: 7, eval_every_steps: 3}
parallel: {ep: 4, fsdp: auto, replicate: 1, tp: 1, cp: 1, pp: 1}
moe: {router: train, aux_loss_coef: from_model, bias_update_rate: 0.0, dispatch: auto, compute: auto}
checkpoint: {every_steps: 200, every_minutes: null, keep_last: 3, asynchronous: true, resume: auto}
distributed: {timeout_seconds: 600, first_step_timeout_seconds: 1800}
log: {every_steps: 1, report_to: [tensorboard]}
output_dir: runs/qwen3-sft
"""


def test_the_whole_schema_is_read_and_typed(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, base=DESIGN))
    assert config.optim.learning_rate == 1e-5
    assert isinstance(config.optim.weight_decay, float)
    assert config.model.revision == "12e4567"
    assert config.data.train[1].format == "messages"
    assert config.log.report_to == ("jsonl", "tensorboard")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "optim: {name: sgd}\n",
        "train: {seed: 7}\nparallel: {ep: 2}\n",
        "lora: {r: 8, targets: [experts]}\n",
        "lora: {from_adapter: some/where, dropout: 0.1}\n",
    ],
)
def test_a_dumped_config_is_read_back_equal(tmp_path: Path, text: str) -> None:
    config = load_config(write(tmp_path, text))
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump_config(config), encoding="utf-8")
    assert load_config(copy) == config
    assert dump_config(load_config(copy)) == dump_config(config)


def test_a_dumped_config_names_no_key_that_does_nothing(tmp_path: Path) -> None:
    assert "betas" not in dump_config(load_config(write(tmp_path, "optim: {name: sgd}\n")))


def test_overrides_win_over_the_file_and_later_ones_over_earlier_ones(tmp_path: Path) -> None:
    path = write(tmp_path, "train: {max_steps: 5}\n")
    config = load_config(path, ["train.max_steps=6", "train.max_steps=7", "data.train.0.path=b", "data.train.1.path=c"])
    assert config.train.max_steps == 7
    assert [source.path for source in config.data.train] == ["b", "c"]


def test_every_problem_is_reported_at_once_each_with_its_place(tmp_path: Path) -> None:
    path = write(tmp_path, "train:\n  max_steps: many\noptim:\n  learning_rate: 1e-5\n  lr: 2\n")
    with pytest.raises(InputError) as caught:
        load_config(path, ["parallel.pp_schedule=zbv", "log.every_steps=0"])
    assert set(str(caught.value).splitlines()) == {
        f"{path}:6: train.max_steps must be an integer of at least 1 or null, not 'many'",
        f"{path}:9: optim.lr is not a key of the configuration; did you mean optim.learning_rate?",
        "override 'log.every_steps=0': log.every_steps must be an integer of at least 1, not 0",
        "override 'parallel.pp_schedule=zbv': parallel.pp_schedule is 'zbv', but zero-bubble schedules compute weight "
        "gradients apart from the rest of backward, where FSDP2 does not reduce them and the last stage silently gets "
        "none; use 1f1b or interleaved_1f1b",
    }


def test_an_override_in_place_of_a_file_line_takes_the_blame(tmp_path: Path) -> None:
    path = write(tmp_path, "train: {max_steps: 5}\n")
    with refused("config.wrong-value", naming="override 'train={max_steps: 0}'"):
        load_config(path, ["train={max_steps: 0}"])


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (b"", "config.missing-key"),
        (b"- a\n", "config.wrong-value"),
        (b"a: \xff\n", "config.file-unreadable"),
    ],
)
def test_a_file_that_holds_no_config_is_refused(tmp_path: Path, content: bytes, key: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        load_config(path)
    assert caught.value.key == key
    assert str(caught.value).startswith(f"{path}: ")


def test_a_path_without_a_file_is_refused(tmp_path: Path) -> None:
    for path, key in ((tmp_path / "none.yaml", "config.file-missing"), (tmp_path, "config.file-unreadable")):
        with pytest.raises(InputError) as caught:
            load_config(path)
        assert caught.value.key == key


def test_importing_config_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'datasets', 'numpy', 'safetensors'}"
    code = f"import expertmesh.config, sys; assert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_config_cannot_change(tmp_path: Path) -> None:
    config: Config = load_config(write(tmp_path))
    with pytest.raises(ValueError, match="frozen"):
        config.train.max_steps = 3  # type: ignore[misc]
    assert hash(config) == hash(load_config(write(tmp_path)))
