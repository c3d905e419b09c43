"""Preference training in every layout equals the unsharded model, under TRL's DPOTrainer or TRL's loss functions."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import expertmesh as em
from expertmesh.config import Config
from expertmesh.state.model_view import mesh_of
from expertmesh.training import loop
from expertmesh.training.run import train
from tests.adapters.reference import in_files
from tests.support.ranks import shared_ranks
from tests.support.reference import of_all_stages, worst
from tests.training.dpo_by_trl import FIGURES, STEPS, ByTrl, preference_config, train_by_trl
from tests.training.pairs_by_hand import train_by_hand
from tests.training.tiny_run import metrics, write_inputs

TOLERANCE = 1e-5
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one rank": (1, []),
    "ep": (2, ["parallel.ep=2"]),
    "fsdp": (2, ["parallel.ep=1", "train.micro_batch_size=2"]),
    "replicate": (2, ["parallel.replicate=2"]),
    "tp": (2, ["parallel.tp=2", "train.micro_batch_size=2"]),
    "cp": (2, ["parallel.cp=2", "train.micro_batch_size=2"]),
    "pp": (2, ["parallel.pp=2", "parallel.ep=1"]),
    "all": (8, ["parallel.pp=2", "parallel.cp=2", "parallel.tp=2", "parallel.ep=4"]),
    "replicas of ep": (4, ["parallel.replicate=2", "parallel.ep=2", "train.activation_checkpointing=full"]),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def expected(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> ByTrl:
    scratch = tmp_path_factory.mktemp("trl")
    return train_by_trl(preference_config(inputs, scratch / "run"), scratch)


def unsharded(config: Config, dtype: torch.dtype = torch.float32) -> Any:
    """The model that a run of `config` starts from: of a reward model with the head that transformers draws first."""
    directory = config.model.name_or_path
    if not config.objective.facts.rewards:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    pad, auto = AutoTokenizer.from_pretrained(directory).pad_token_id, AutoModelForSequenceClassification
    torch.manual_seed(config.train.seed)
    # Drawn in fp32, whatever the dtype.
    drawn: Any = auto.from_pretrained(directory, dtype=torch.float32, num_labels=1).score.weight.data
    model: Any = auto.from_pretrained(directory, dtype=dtype, num_labels=1, pad_token_id=pad)
    model.score.weight.data = drawn.to(dtype)
    return model


def saved(directory: Path) -> Any:
    """The model in `directory`, by the class that its config names."""
    (name,) = json.loads((directory / "config.json").read_text())["architectures"]
    return getattr(transformers, name).from_pretrained(directory)


def train_keeping_gradients(config: Config, tamper: Callable[[], Any] | None = None) -> dict[str, Tensor]:
    """The run, and its first step's clipped gradients; adapters' by PEFT's keys."""
    found: dict[str, Tensor] = {}
    clip = loop.clip_grad_norm_

    def keeping(model: Any, max_norm: float) -> Tensor:
        norm = clip(model, max_norm)
        if not found:
            gradients = of_all_stages(model, mesh_of(model), lambda parameter: parameter.grad)
            found.update(gradients if config.lora is None else in_files(model, gradients))
        return norm

    if tamper is not None:
        tamper()
    with mock.patch.object(loop, "clip_grad_norm_", keeping):
        train(config)
    return found


def check(
    output: Path,
    gradients: dict[str, Tensor],
    trained: dict[str, Tensor],
    expected: ByTrl,
    tolerance: float = TOLERANCE,
) -> None:
    """Loss, gradient norm, figures of every step and of the evaluation, every gradient, the weights at the end."""
    rows = [row for row in metrics(output) if "loss" in row]
    assert len(rows) == len(expected.rows) == STEPS
    for row, want in zip(rows, expected.rows, strict=True):
        assert row["loss"] == pytest.approx(want["loss"], rel=tolerance), row["step"]
        assert row["grad_norm"] == pytest.approx(want["grad_norm"], rel=tolerance), row["step"]
        for name in FIGURES:
            # Before the first update rewards are zero, and which is higher is a matter of rounding.
            if name != "rewards/accuracies" or row["step"] > 1:
                assert row[name] == pytest.approx(want[name], rel=tolerance, abs=tolerance), (name, row["step"])
    assert worst(gradients, expected.gradients)[0] <= tolerance, worst(gradients, expected.gradients)
    assert worst(trained, expected.weights)[0] <= tolerance, worst(trained, expected.weights)


@pytest.mark.slow_cases(
    r"(one rank|fsdp|replicate|replicas of ep|all|cp|tp)", why="ep and pp stay, and the planted bug of cp"
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_norm_gradients_and_weights_equal_trls(inputs: Path, tmp_path: Path, expected: ByTrl, layout: str) -> None:
    world, options = LAYOUTS[layout]
    config = preference_config(inputs, tmp_path / "run", *options)
    gradients = shared_ranks(train_keeping_gradients, world, config)[0]
    trained = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").named_parameters())
    check(tmp_path / "run", gradients, trained, expected)


@pytest.mark.slow(why="one family stays")
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_other_families_equal_trls(tmp_path: Path, family: str) -> None:
    inputs = write_inputs(tmp_path, family)
    # GPT-OSS's key biases have gradients that nearly cancel: of their rounding a small eps makes steps.
    config = preference_config(inputs, tmp_path / "run", "parallel.pp=2", "parallel.ep=2", "optim.eps=1e-4")
    by_trl = train_by_trl(config, tmp_path)
    gradients = shared_ranks(train_keeping_gradients, 4, config)[0]
    trained = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").named_parameters())
    check(tmp_path / "run", gradients, trained, by_trl)


def test_evaluation_equals_trls(inputs: Path, tmp_path: Path, expected: ByTrl) -> None:
    options = [f"data.eval=[{{path: {inputs / 'pairs.jsonl'}}}]", "parallel.pp=2", "parallel.ep=1"]
    shared_ranks(train, 2, preference_config(inputs, tmp_path / "run", *options))
    row = metrics(tmp_path / "run")[-1]
    assert row["eval_loss"] == pytest.approx(expected.evaluation["eval_loss"], rel=TOLERANCE)
    for name in FIGURES:
        assert row[f"eval_{name}"] == pytest.approx(expected.evaluation[f"eval_{name}"], rel=TOLERANCE), name


@pytest.mark.slow(why="another run of TRL")
def test_the_routers_loss_is_taken_over_both_responses_as_trls_is(inputs: Path, tmp_path: Path) -> None:
    config = preference_config(inputs, tmp_path / "run", "moe.aux_loss_coef=0.02", "parallel.ep=2")
    by_trl = train_by_trl(config, tmp_path / "trl", router_aux_loss_coef=0.02)
    gradients = shared_ranks(train_keeping_gradients, 2, config)[0]
    # TRL's loss has the routers' in it.
    rows = metrics(tmp_path / "run")
    total = [row["loss"] + 0.02 * row["aux_loss"] for row in rows]
    assert total == pytest.approx([row["loss"] for row in by_trl.rows], rel=TOLERANCE)
    assert worst(gradients, by_trl.gradients)[0] <= TOLERANCE


LORA = "lora={r: 4, alpha: 8, targets: [attention, experts, router]}"
# B starts at zero: with a small eps its first steps would be the sign of what may be rounding.
EPS = "optim.eps=1.0e-4"
ADAPTED = {
    "one rank": (1, []),
    "ep": (2, ["parallel.ep=2"]),
    "replicate": (2, ["parallel.replicate=2", "train.activation_checkpointing=selective"]),
    "tp": (2, ["parallel.tp=2"]),
    "cp": (2, ["parallel.cp=2", "train.micro_batch_size=2"]),
    "pp": (2, ["parallel.pp=2", "parallel.ep=1"]),
    "all": (8, ["parallel.pp=2", "parallel.cp=2", "parallel.tp=2", "parallel.ep=4"]),
}


def _start_adapter(config: Config, directory: Path, filled: bool) -> None:
    """Write the adapter that a run of `config` starts from; `filled`: with values that are not zero in B as well."""
    model = em.load_model(
        config.model.name_or_path,
        em.init_mesh(em.ParallelConfig(ep=1)),
        lora=config.lora,
        precision=config.precision,
        task="reward" if config.objective.facts.rewards else None,
    )
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if filled and "lora_B" in name:
            parameter.data.to_local().normal_(0, 0.05, generator=generator)
    em.save_adapter(model, directory)


def _adapted_by_trl(config: Config, adapter: Path, scratch: Path) -> ByTrl:
    base = AutoModelForCausalLM.from_pretrained(config.model.name_or_path)
    adapted = peft.PeftModel.from_pretrained(base, str(adapter), is_trainable=True)
    return train_by_trl(config, scratch, adapted)


@pytest.fixture(scope="module")
def expected_adapted(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> ByTrl:
    scratch = tmp_path_factory.mktemp("adapted")
    config = preference_config(inputs, scratch / "run", LORA, EPS)
    shared_ranks(_start_adapter, 1, config, scratch / "start", False)
    return _adapted_by_trl(config, scratch / "start", scratch)


def _check_adapted(output: Path, gradients: dict[str, Tensor], expected: ByTrl, tolerance: float = TOLERANCE) -> None:
    saved = load_file(output / "adapter" / "adapter_model.safetensors")
    by_key = [
        {re.sub(r"(\.modules_to_save)?\.default\.", ".", name): tensor for name, tensor in tensors.items()}
        for tensors in (expected.gradients, expected.weights)
    ]
    check(output, gradients, saved, replace(expected, gradients=by_key[0], weights=by_key[1]), tolerance)


@pytest.mark.slow(why="the whole model's layouts stay, and the planted bug of the reference")
@pytest.mark.parametrize("layout", ADAPTED)
def test_adapters_equal_stock_pefts_under_trl(
    inputs: Path, tmp_path: Path, expected_adapted: ByTrl, layout: str
) -> None:
    world, options = ADAPTED[layout]
    config = preference_config(inputs, tmp_path / "run", LORA, EPS, *options)
    gradients = shared_ranks(train_keeping_gradients, world, config)[0]
    _check_adapted(tmp_path / "run", gradients, expected_adapted)


@pytest.mark.slow(why="another run of TRL")
def test_an_adapter_that_is_continued_is_its_own_reference(inputs: Path, tmp_path: Path) -> None:
    start = tmp_path / "start"
    shared_ranks(_start_adapter, 1, preference_config(inputs, tmp_path / "first", LORA), start, True)
    config = preference_config(inputs, tmp_path / "run", f"lora={{from_adapter: {start}}}", "parallel.ep=2")
    by_trl = _adapted_by_trl(config, start, tmp_path)
    _check_adapted(tmp_path / "run", shared_ranks(train_keeping_gradients, 2, config)[0], by_trl)


EXACT = ["precision={params: float64, compute: float64, reduce: float64}", "optim.eps=1.0e-4"]
WITHOUT_REFERENCE = {
    "simpo": "objective={name: simpo, beta: 2.0, gamma: 0.5}",
    "orpo": "objective={name: orpo, beta: 0.2}",
    "reward": "objective={name: reward}",
}
BY_LAYER = {"by layer": (2, ["parallel.ep=2", "train.accumulate=by_layer"])}
# Pairwise: dpo, whose mechanism they share, has every layout.
OF_PAIRS = [
    *(("simpo", layout) for layout in ("one rank", "ep", "tp", "pp", "all")),
    *(("orpo", layout) for layout in ("replicas of ep", "cp", "all", "by layer")),
    *(("reward", layout) for layout in (*LAYOUTS, "by layer")),
]


@pytest.fixture(scope="module")
def in_fp64(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, with weights in fp64, in which a run then writes its own."""
    inputs = write_inputs(tmp_path_factory.mktemp("in fp64"))
    AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float64).save_pretrained(inputs / "model")
    return inputs


@pytest.fixture(scope="module")
def by_hand(in_fp64: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ByTrl]:
    scratch = tmp_path_factory.mktemp("by hand")

    @cache
    def train_once(*options: str) -> ByTrl:
        config = preference_config(in_fp64, scratch / "run", *options)
        dtype = getattr(torch, config.precision.params)
        model = unsharded(config, dtype)
        model.set_experts_implementation("eager")
        if config.lora is not None:
            start = scratch / config.objective.name
            shared_ranks(_start_adapter, 1, config, start, False)
            model = peft.PeftModel.from_pretrained(model, str(start), is_trainable=True, autocast_adapter_dtype=False)
        return train_by_hand(config, model)

    return train_once


@pytest.mark.slow_cases(
    r"(?!simpo-pp|orpo-cp|reward-(ep|tp)).*", why="an axis of each stays; what they share is tested with dpo"
)
@pytest.mark.parametrize(("name", "layout"), OF_PAIRS)
def test_objectives_without_a_reference_equal_the_unsharded_model(
    in_fp64: Path, tmp_path: Path, by_hand: Callable[..., ByTrl], name: str, layout: str
) -> None:
    world, options = {**LAYOUTS, **BY_LAYER}[layout]
    own = [WITHOUT_REFERENCE[name], *EXACT]
    gradients = shared_ranks(
        train_keeping_gradients, world, preference_config(in_fp64, tmp_path / "run", *own, *options)
    )[0]
    trained = dict(saved(tmp_path / "run" / "model").named_parameters())
    check(tmp_path / "run", gradients, trained, by_hand(*own), 1e-10)


@pytest.mark.slow(why="the whole model's layouts stay")
@pytest.mark.parametrize("name", WITHOUT_REFERENCE)
def test_objectives_without_a_reference_in_fp32(
    in_fp64: Path, tmp_path: Path, by_hand: Callable[..., ByTrl], name: str
) -> None:
    own = [WITHOUT_REFERENCE[name], EPS]
    config = preference_config(in_fp64, tmp_path / "run", *own, "parallel.ep=2", "parallel.tp=2")
    gradients = shared_ranks(train_keeping_gradients, 2, config)[0]
    trained = dict(saved(tmp_path / "run" / "model").named_parameters())
    check(tmp_path / "run", gradients, trained, by_hand(*own))


@pytest.mark.slow_cases(r"(simpo|orpo)-.*|reward-(cp|pp|by layer|all)", why="the whole model's layouts stay")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("simpo", "pp"), ("simpo", "by layer"), ("orpo", "tp")),
        *(("reward", layout) for layout in ("ep", "tp", "cp", "pp", "by layer", "all")),
    ],
)
def test_adapters_without_a_reference_equal_stock_pefts(
    in_fp64: Path, tmp_path: Path, by_hand: Callable[..., ByTrl], name: str, layout: str
) -> None:
    world, options = {**ADAPTED, **BY_LAYER}[layout]
    own = [WITHOUT_REFERENCE[name], *EXACT, LORA]
    config = preference_config(in_fp64, tmp_path / "run", *own, *options)
    gradients = shared_ranks(train_keeping_gradients, world, config)[0]
    _check_adapted(tmp_path / "run", gradients, by_hand(*own), 1e-10)
