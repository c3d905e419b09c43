"""A reward model, and classifiers in loops of one's own, equal the unsharded model of transformers in every layout.

test_dpo_parity.py has every layout of `objective.name: reward` in fp64; here TRL's RewardTrainer is the oracle.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import trl
from torch import Tensor
from transformers import AutoModelForSequenceClassification

import expertmesh as em
from expertmesh.config import Config
from expertmesh.step import loss
from expertmesh.step.objectives import Reward
from expertmesh.training.run import train
from tests.adapters.reference import EXPERTS, random_adapter
from tests.support.errors import refused, refused_on_ranks
from tests.support.models import tiny_model
from tests.support.ranks import shared_ranks
from tests.support.reference import of_all_stages, worst
from tests.training.dpo_by_trl import PAIRS, ByTrl, preference_config, trained_by_trl
from tests.training.test_dpo_parity import EPS, saved, train_keeping_gradients, unsharded
from tests.training.tiny_run import metrics, rows_without_times, train_steps, write_inputs

REWARD = "objective={name: reward}"
# By TRL's names and ours.
FIGURES = {"accuracy": "rewards/accuracies", "margin": "rewards/margins"}
FP64 = em.PrecisionConfig(params="float64", compute="float64", reduce="float64")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def expected(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> ByTrl:
    """By TRL. Its RewardConfig has no beta and no factor of a router loss."""
    scratch = tmp_path_factory.mktemp("trl")
    config = preference_config(inputs, scratch / "run", REWARD, EPS)
    return _by_trl(config, scratch, unsharded(config))


def _by_trl(config: Config, scratch: Path, model: Any) -> ByTrl:
    def arguments(beta: float, router_aux_loss_coef: float, **others: Any) -> Any:
        return trl.RewardConfig(**others)

    return trained_by_trl(trl.RewardTrainer, arguments, PAIRS, PAIRS, config, scratch, model)


def _check(output: Path, gradients: dict[str, Tensor], expected: ByTrl) -> None:
    _check_steps(output, gradients, expected)
    assert worst(dict(saved(output / "model").named_parameters()), expected.weights)[0] <= 1e-5


def _check_steps(output: Path, gradients: dict[str, Tensor], expected: ByTrl) -> None:
    rows = [row for row in metrics(output) if "loss" in row]
    assert len(rows) == len(expected.rows)
    for row, want in zip(rows, expected.rows, strict=True):
        mean = (row["rewards/chosen"] + row["rewards/rejected"]) / 2
        got = [row["loss"], row["grad_norm"], mean, *(row[name] for name in FIGURES.values())]
        by_trl = [want[name] for name in ("loss", "grad_norm", "mean_reward", *FIGURES)]
        assert got == pytest.approx(by_trl, rel=1e-5, abs=1e-6), row["step"]
    assert worst(gradients, expected.gradients)[0] <= 1e-5


def _run(inputs: Path, output: Path, tamper: Callable[[], Any] | None = None, *options: str) -> dict[str, Tensor]:
    config = preference_config(inputs, output, REWARD, EPS, "parallel.ep=2", "train.micro_batch_size=2", *options)
    return shared_ranks(train_keeping_gradients, 2, config, tamper)[0]


def test_a_reward_model_equals_trls(inputs: Path, tmp_path: Path, expected: ByTrl) -> None:
    options = f"data.eval=[{{path: {inputs / 'pairs.jsonl'}}}]"
    _check(tmp_path / "run", _run(inputs, tmp_path / "run", None, options), expected)
    row = metrics(tmp_path / "run")[-1]
    assert row["eval_loss"] == pytest.approx(expected.evaluation["eval_loss"], rel=1e-5)
    assert row["eval_rewards/margins"] == pytest.approx(expected.evaluation["eval_margin"], rel=1e-5, abs=1e-6)


def _mean_of_a_rank() -> None:
    """Divide by the pairs of a micro-batch, as a mean over each rank's would."""
    of_step = Reward.term

    def term(self: Reward, losses: Any, batch: dict[str, Tensor]) -> Any:
        return of_step(replace(self, count=len(batch["input_ids"])), losses, batch)

    Reward.term = term  # type: ignore[method-assign]


def _last_of_the_row() -> None:
    """Read each row at its last position, which may be padding."""
    of_class = loss._labels_of_last_tokens

    def last(model: Any, batch: Any, share: Any) -> Any:
        others = {key: batch[key] for key in batch if key not in ("real_tokens", "attention_mask")}
        return of_class(model, {**others, "input_ids": torch.full_like(batch["input_ids"], -1)}, share)

    loss._labels_of_last_tokens = last


@pytest.mark.parametrize("planted", [_mean_of_a_rank, _last_of_the_row])
def test_planted_bugs_are_seen(inputs: Path, tmp_path: Path, expected: ByTrl, planted: Callable[[], Any]) -> None:
    gradients = _run(inputs, tmp_path / "run", planted)
    with pytest.raises(AssertionError):
        _check(tmp_path / "run", gradients, expected)


def _started_from_adapter(inputs: Path, root: Path) -> tuple[Config, Any]:
    start = f"lora={{from_adapter: {root / 'start'}}}"
    config = preference_config(inputs, root / "run", REWARD, EPS, start, "parallel.ep=2", "train.micro_batch_size=2")
    return config, random_adapter(unsharded(config), root / "start", ["q_proj"], EXPERTS, task_type="SEQ_CLS")


def test_a_classifiers_adapter_of_peft_goes_on_as_trl_trains_it(inputs: Path, tmp_path: Path) -> None:
    config, adapted = _started_from_adapter(inputs, tmp_path)
    expected = _by_trl(config, tmp_path / "trl", adapted)
    wanted = {re.sub(r"(\.modules_to_save)?\.default", "", name): g for name, g in expected.gradients.items()}
    gradients = shared_ranks(train_keeping_gradients, 2, config, None)[0]
    assert "base_model.model.score.weight" in gradients
    _check_steps(tmp_path / "run", gradients, replace(expected, gradients=wanted))


def test_a_classifiers_adapter_without_its_head_is_refused(inputs: Path, tmp_path: Path) -> None:
    config, _ = _started_from_adapter(inputs, tmp_path)
    path = tmp_path / "start" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "modules_to_save": ["embed_tokens"]}))
    with refused_on_ranks("lora.on-classifier", naming="without score"):
        shared_ranks(train, 2, config)


@torch.no_grad()
def _adapted(base: Path, seed: int, start: Path | None, target: Path | None) -> Tensor:
    """A classifier with adapters alone, of a new head that depends on the seed; its logits."""
    mesh = em.init_mesh(em.ParallelConfig(ep=1))
    lora = em.LoraConfig(r=4) if start is None else em.LoraConfig(from_adapter=str(start))
    model = em.load_model(base, mesh, precision=FP64, lora=lora, task="classification", num_labels=3, seed=seed)
    model.config.pad_token_id = 0
    if target is not None:
        em.save_adapter(model, target)
    logits: Tensor = model.eval()(input_ids=torch.arange(3, 19)[None], use_cache=False).logits
    return logits


def test_a_head_is_no_part_of_the_base_of_an_adapter_alone(
    of_class: tuple[Path, float, dict[str, Tensor]], tmp_path: Path
) -> None:
    """The base's new head depends on the seed, and the adapter brings the trained one."""
    first = shared_ranks(_adapted, 1, of_class[0], 5, None, tmp_path / "adapter")[0]
    assert torch.equal(shared_ranks(_adapted, 1, of_class[0], 6, tmp_path / "adapter", None)[0], first)
    assert not torch.equal(shared_ranks(_adapted, 1, of_class[0], 6, None, None)[0], first)


@pytest.mark.slow_cases(r".*another layout", why="the same layout stays")
@pytest.mark.parametrize(
    "then",
    [pytest.param([], id="the same layout"), pytest.param(["parallel.ep=1", "parallel.tp=2"], id="another layout")],
)
def test_resumed_it_ends_as_the_run_that_was_not_stopped(inputs: Path, tmp_path: Path, then: list[str]) -> None:
    config = [preference_config(inputs, tmp_path / name, REWARD, EPS, "parallel.ep=2") for name in ("whole", "parts")]
    shared_ranks(train, 2, config[0])
    shared_ranks(train_steps, 2, config[1], 2)
    shared_ranks(train, 2, preference_config(inputs, tmp_path / "parts", REWARD, EPS, *(then or ["parallel.ep=2"])))
    whole, parts = (dict(saved(tmp_path / name / "model").named_parameters()) for name in ("whole", "parts"))
    if then:
        assert worst(parts, whole)[0] <= 1e-5
    else:
        assert all(torch.equal(parts[name], value) for name, value in whole.items())
        assert rows_without_times(tmp_path / "parts") == rows_without_times(tmp_path / "whole")


def test_generated_samples_are_refused(inputs: Path, tmp_path: Path) -> None:
    with refused("config.combination", naming="eval.samples"):
        options = [f"data.eval=[{{path: {inputs / 'pairs.jsonl'}}}]", "eval.samples=2"]
        preference_config(inputs, tmp_path / "run", REWARD, *options)


# Rows of a step by data rank: of different lengths, one without a label, and another number on each rank.
LENGTHS = [[7, 4, 9], [5, 8]]
CLASSES = [[2, -100, 0], [1, 2]]


def _rows(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(1, 96, (length,), generator=generator) for length in LENGTHS[rank]]


def _batch(rank: int) -> dict[str, Tensor]:
    rows = _rows(rank)
    ids, mask = (
        torch.nn.utils.rnn.pad_sequence(each, batch_first=True) for each in (rows, list(map(torch.ones_like, rows)))
    )
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(CLASSES[rank])}


def _classified(directory: Path, parallel: dict[str, Any], bug: bool) -> tuple[float, dict[str, Tensor]]:
    mesh = em.init_mesh(em.ParallelConfig(**parallel))
    model = em.load_model(directory, mesh, precision=FP64, task="classification", num_labels=3, seed=5)
    model.config.pad_token_id = 0
    ranks = mesh.layout.data_ranks
    # Alone, a data rank has the rows of both.
    batches = [_batch(rank) for rank in range(2)] if ranks == 1 else [_batch(mesh.data_rank)]
    if bug:
        batches[0]["labels"] = batches[0]["labels"].clamp(min=0)
    total = em.forward_backward(model, batches, target_tokens=4).loss
    torch.distributed.all_reduce(total)
    return float(total), of_all_stages(model, mesh, lambda parameter: parameter.grad)


@pytest.fixture(scope="module")
def of_class(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float, dict[str, Tensor]]:
    """A language model in fp64; the loss and the gradients of transformers' own classifier, row by row."""
    directory = tmp_path_factory.mktemp("classifier")
    tiny_model("qwen3_moe").double().save_pretrained(directory)
    auto: Any = AutoModelForSequenceClassification
    torch.manual_seed(5)
    head = auto.from_pretrained(directory, num_labels=3, dtype=torch.float32).score.weight.data
    model = auto.from_pretrained(directory, num_labels=3, dtype=torch.float64, experts_implementation="eager")
    model.score.weight.data = head.double()
    rows = [row for rank in range(2) for row in zip(_rows(rank), CLASSES[rank], strict=True)]
    losses = [F.cross_entropy(model(ids[None]).logits, torch.tensor([label])) for ids, label in rows if label >= 0]
    total = torch.stack(losses).sum() / 4
    total.backward()
    return directory, float(total), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow_cases(r"(cp|pp|all).*", why="ep and tp stay")
@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({"ep": 2}, id="ep"),
        pytest.param({"tp": 2, "ep": 1}, id="tp"),
        pytest.param({"cp": 2, "ep": 2}, id="cp"),
        pytest.param({"pp": 2, "ep": 1}, id="pp"),
        pytest.param({"pp": 2, "tp": 2, "ep": 2}, id="all"),
    ],
)
def test_a_classifier_in_a_loop_equals_transformers(
    of_class: tuple[Path, float, dict[str, Tensor]], parallel: dict[str, Any]
) -> None:
    directory, total, gradients = of_class
    world = 4 if len(parallel) > 2 else 2
    found, own = shared_ranks(_classified, world, directory, parallel, False)[0]
    assert found == pytest.approx(total, rel=1e-10)
    assert worst(own, gradients)[0] <= 1e-10


def test_a_row_without_a_label_that_counts_is_seen(of_class: tuple[Path, float, dict[str, Tensor]]) -> None:
    directory, total, gradients = of_class
    found, own = shared_ranks(_classified, 2, directory, {"ep": 2}, True)[0]
    assert abs(found - total) > 1e-3
    assert worst(own, gradients)[0] > 1e-3


def _refused(directory: Path, what: str, tp: int = 1) -> None:
    mesh = em.init_mesh(em.ParallelConfig(ep=1, tp=tp))
    task: Any = "classification" if what in ("padding", "shape") else "reward"
    model: Any = em.load_model(directory, mesh, task=task)
    batch = _batch(0)
    if what != "padding":
        model.config.pad_token_id = 0
    if what == "call":
        model(input_ids=batch["input_ids"][:, :8], use_cache=False)
    if what == "shape":
        batch["labels"] = batch["input_ids"]
    em.forward_backward(model, [batch], target_tokens=2)


def test_what_a_classifier_cannot_do_is_refused(of_class: tuple[Path, float, dict[str, Tensor]]) -> None:
    directory = of_class[0]
    with refused_on_ranks("model.no-padding-token", naming="pad_token_id"):
        shared_ranks(_refused, 1, directory, "padding")
    with refused_on_ranks("model.one-label", naming="objective.name reward"):
        shared_ranks(_refused, 1, directory, "one label")
    with refused_on_ranks("data.batch-shape", naming="[B]"):
        shared_ranks(_refused, 1, directory, "shape")
    with refused_on_ranks("layout.ranks-share-rows", naming="forward_backward"):
        shared_ranks(_refused, 2, directory, "call", 2)
    with refused_on_ranks("config.combination", naming="num_labels is 2"):
        shared_ranks(_two_labels, 1, directory)


def _two_labels(directory: Path) -> None:
    em.load_model(directory, em.init_mesh(em.ParallelConfig(ep=1)), task="reward", num_labels=2)
