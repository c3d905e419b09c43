"""What each section accepts and refuses, asked through the file as a user would."""

import re
from pathlib import Path

import pytest

from expertmesh.config import (
    Config,
    DataConfig,
    DataSource,
    InputError,
    LoraConfig,
    MoeConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    load_config,
)
from tests.config.minimal import write
from tests.support.errors import refused


def refusal_of(tmp_path: Path, *overrides: str) -> InputError:
    with pytest.raises(InputError) as caught:
        load_config(write(tmp_path), overrides)
    return caught.value


def refusal(tmp_path: Path, *overrides: str) -> str:
    return str(refusal_of(tmp_path, *overrides))


@pytest.mark.parametrize(
    "override",
    [
        "train.max_steps='10'",
        "train.max_steps=10.0",
        "train.max_steps=true",
        "train.seed=-1",
        "train.activation_checkpointing=some",
        "train.checkpoint_layers=1",
        "train.checkpoint_layers=every",
        "train.checkpoint_layers=[-1]",
        "train.compile=yes",
        "optim.learning_rate='1e-5'",
        "optim.learning_rate=0",
        "optim.learning_rate=.nan",
        "optim.betas=0.9",
        "optim.betas=[0.9, 0.95, 0.99]",
        "optim.max_grad_norm=0",
        "schedule.warmup_ratio=1.5",
        "data.packing=yes",
        "data.packing=1",
        "data.max_length=1",
        "data.train=[]",
        "data.train=1",
        "data.train.0.format=csv",
        "model.name_or_path=7",
        "model.attention=flash",
        "log.report_to=1",
        "log.project=3",
        "parallel.ep=0",
        "parallel.fsdp=all",
        "precision.params=float16",
        "precision.compute=fp8",
        "output_dir=",
        "train=",
    ],
)
def test_a_value_of_another_kind_is_refused_and_named(tmp_path: Path, override: str) -> None:
    error = refusal_of(tmp_path, override)
    assert error.key == "config.wrong-value"
    assert str(error).startswith(f"override {override!r}: {override.partition('=')[0]} ")
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["precision={params: bfloat16, compute: float32}"], "precision.compute"),
        (["precision.params=float64"], "precision.params, compute and reduce"),
        (["train={global_batch_size: 6, micro_batch_size: 4}"], "train.global_batch_size (6)"),
        (["train={global_batch_size: 2, micro_batch_size: 4}"], "train.global_batch_size (2)"),
        (["optim={name: sgd, betas: [0.9, 0.95]}"], "optim.betas"),
        (["optim={name: sgd, eps: 1e-8}"], "optim.eps"),
        (["optim={name: sgd, stochastic_rounding: true}"], "optim.stochastic_rounding"),
        (["optim.stochastic_rounding=true"], "optim.stochastic_rounding is true"),
        (["optim={name: adamw_8bit, momentum: 0.9}"], "optim.momentum"),
        (["optim={name: sgd, momentum: 0.9}"], "optim.momentum"),
        (["parallel={ep: 4, fsdp: 6}"], "parallel.ep is 4"),
        (["distributed.timeout_seconds=3600"], "distributed.first_step_timeout_seconds (1800)"),
        (["moe={router: frozen, aux_loss_coef: 0.01}"], "moe.aux_loss_coef is 0.01"),
        (["moe={router: frozen, bias_update_rate: 1e-3}"], "moe.bias_update_rate is 0.001"),
        (["train.eval_every_steps=5"], "train.eval_every_steps is 5"),
        (["model.from_config=true", "lora={}"], "model.from_config is true"),
        (["model.from_config=true", "precision.frozen=nf4"], "precision.frozen is nf4"),
        (
            ["model.attention=flash_attention_2", "precision={params: float32, compute: float32}"],
            "model.attention is flash_attention_2",
        ),
    ],
)
def test_impossible_combinations_are_refused_and_named(tmp_path: Path, overrides: list[str], named: str) -> None:
    error = refusal_of(tmp_path, *overrides)
    assert error.key == "config.combination"
    assert re.search(rf"(^|: ){re.escape(named)}[ ,]", str(error))
    assert "\n" not in str(error)


def test_valid_choices_of_every_kind_are_accepted(tmp_path: Path) -> None:
    overrides = [
        "precision={params: float64, compute: float64, reduce: float64}",
        "optim={name: muon, momentum: 0.9, betas: [0.9, 0.99]}",
        "moe={aux_loss_coef: 0.0, router: frozen, dispatch: all_to_all, compute: loop}",
        "schedule={name: constant, warmup_ratio: 0}",
        "parallel={ep: 2, fsdp: 4, replicate: 2}",
        "data.eval.0.path=e.jsonl",
        "train.eval_every_steps=2",
    ]
    config = load_config(write(tmp_path), overrides)
    assert config.moe.aux_loss_coef == 0.0
    assert config.parallel.fsdp == 4


def test_weights_from_a_config_are_a_key_of_runs_that_have_it(tmp_path: Path) -> None:
    # Of a run without it nothing changes: its checkpoints, written before the key existed, go on.
    plain, random = load_config(write(tmp_path)), load_config(write(tmp_path), ["model.from_config=true"])
    assert "from_config" not in plain.model_dump()["model"]
    assert random.model_dump()["model"]["from_config"] is True
    assert (plain.weights_seed, random.weights_seed) == (None, random.train.seed)


def test_sections_built_in_python_refuse_the_same() -> None:
    with refused("config.combination", naming="parallel.pp_virtual_stages is 2, but pp is 1"):
        ParallelConfig(pp_virtual_stages=2)
    with refused("config.combination", naming="parallel.pp_virtual_stages is 2, but pp_schedule is gpipe"):
        ParallelConfig(pp=2, pp_virtual_stages=2, pp_schedule="gpipe")
    with refused("config.combination", naming="parallel.pp_schedule is interleaved_1f1b"):
        ParallelConfig(pp=2, pp_schedule="interleaved_1f1b")
    for name in ("InterleavedZeroBubble", "zbv_zero_bubble", "dual_pipe_v", "zb1p"):
        with refused("config.wrong-value", naming="zero-bubble"):
            ParallelConfig(pp=2, pp_schedule=name)  # type: ignore[arg-type]
    for name in ("nccl_ep", "nccl.ep"):
        with refused("config.wrong-value", naming="nccl.ep is not supported"):
            MoeConfig(dispatch=name)  # type: ignore[arg-type]
    with refused("config.wrong-value", naming="parallel.ep"):
        ParallelConfig(ep="2")  # type: ignore[arg-type]
    with refused("config.combination", naming="precision.compute is float32"):
        PrecisionConfig(params="bfloat16", compute="float32")
    with refused("config.unknown-key", naming="moe.expert_compute"):
        MoeConfig(expert_compute="loop")  # type: ignore[call-arg]


def test_sections_built_in_python_take_lists_and_other_sections() -> None:
    data = DataConfig(train=[DataSource(path="a")])  # type: ignore[arg-type]
    assert data.train == (DataSource(path="a"),)
    assert OptimConfig(name="sgd").betas == (0.9, 0.95)


@pytest.mark.parametrize(
    "override",
    ["lora={r: 0}", "lora={r: 1.5}", "lora={alpha: 0}", "lora={dropout: 1}", "lora={targets: []}", "lora={targets: 1}"],
)
def test_adapters_of_another_kind_are_refused_and_named(tmp_path: Path, override: str) -> None:
    assert f"lora.{override[6:].partition(':')[0]} " in refusal(tmp_path, override)


def test_adapters_have_targets_and_a_scaling_by_default(tmp_path: Path) -> None:
    lora = load_config(write(tmp_path, "lora: {alpha: 8}\n")).lora
    assert lora is not None
    assert (lora.r, lora.scaling, lora.targets, lora.dropout) == (16, 0.5, ("attention", "experts"), 0.0)
    stable = load_config(write(tmp_path, "lora: {alpha: 8, use_rslora: true}\n")).lora
    assert stable is not None
    assert stable.scaling == 2.0


def test_a_dtype_of_the_saved_model_is_refused_where_adapters_are_saved(tmp_path: Path) -> None:
    assert load_config(write(tmp_path), ["save.dtype=float32"]).save.dtype == "float32"
    assert "save.dtype is float32, but lora is set" in refusal(tmp_path, "lora={r: 8}", "save.dtype=float32")


@pytest.mark.parametrize("said", ["r: 16", "alpha: 32", "targets: [attention]", "use_rslora: false", "init: default"])
def test_what_an_adapter_says_itself_cannot_be_said_twice(tmp_path: Path, said: str) -> None:
    message = refusal(tmp_path, f"lora={{from_adapter: some/where, {said}}}")
    assert f"lora.{said.partition(':')[0]} does nothing beside lora.from_adapter" in message


def test_a_choice_of_blocks_needs_a_mode_and_names_each_block_once(tmp_path: Path) -> None:
    for mode in ("auto", "none"):
        message = refusal(tmp_path, f"train.activation_checkpointing={mode}", "train.checkpoint_layers=2")
        assert f"train.checkpoint_layers does nothing with train.activation_checkpointing {mode}" in message
    for layers in ("[0, 0]", "[]"):
        message = refusal(tmp_path, "train.activation_checkpointing=full", f"train.checkpoint_layers={layers}")
        assert f"train.checkpoint_layers is {layers}, but a list names at least one block" in message
    config = load_config(write(tmp_path), ["train.activation_checkpointing=full", "train.checkpoint_layers=[0, 3]"])
    assert config.train.checkpoint_layers == (0, 3)


def test_adapters_learn_faster_unless_a_rate_is_given(tmp_path: Path) -> None:
    rates = {
        "optim={}": 1e-5,
        "lora={r: 4}": 1e-4,
        "lora={r: 4} optim={eps: 1.0e-6}": 1e-4,
        "lora={r: 4} optim={learning_rate: 1.0e-5}": 1e-5,
        "lora={r: 4} objective={name: dpo} data.packing=false": 1e-5,
    }
    for overrides, rate in rates.items():
        config = load_config(write(tmp_path), re.findall(r"\S+=(?:{.*?}|\S+)", overrides))
        assert config.optim.learning_rate == rate, overrides
    config = load_config(write(tmp_path))
    lora = {"model": config.model, "data": config.data, "output_dir": "o", "lora": LoraConfig()}
    assert Config(**lora, optim=OptimConfig(eps=1e-6)).optim.learning_rate == 1e-4


def test_text_stands_for_a_list_of_one_and_a_path_for_a_source(tmp_path: Path) -> None:
    path = write(tmp_path)
    for train in ("a.jsonl", "[a.jsonl]", "[{path: a.jsonl}]"):
        assert load_config(path, [f"data.train={train}"]).data.train == (DataSource(path="a.jsonl"),)
    config = load_config(path, ["data.eval=[a.jsonl, {path: b.jsonl}]", "lora.targets=experts", "log.report_to=wandb"])
    assert config.data.eval == (DataSource(path="a.jsonl"), DataSource(path="b.jsonl"))
    assert config.lora is not None
    assert config.lora.targets == ("experts",)
    assert "wandb" in config.log.report_to
    assert DataConfig(train="a.jsonl").train == (DataSource(path="a.jsonl"),)  # type: ignore[arg-type]


_LEAST = {"model": {"name_or_path": "m"}, "data": {"train": [{"path": "a.jsonl"}]}, "output_dir": "o"}


@pytest.mark.parametrize("objective", [None, {}, {"name": "sft"}])
def test_adapters_have_their_rate_however_sft_is_named(objective: dict[str, str] | None) -> None:
    said = {} if objective is None else {"objective": objective}
    assert Config.model_validate({**_LEAST, "lora": {}, **said}).optim.learning_rate == 1e-4


def test_a_users_directory_stands_in_place_of_its_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert Config.model_validate({**_LEAST, "output_dir": "~/runs/a"}).output_dir == "/home/somebody/runs/a"
