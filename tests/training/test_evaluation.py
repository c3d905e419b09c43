"""Evaluation: each set by itself and all together, accuracy as the unsharded model's, and what a run makes of it."""

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import expertmesh as em
from expertmesh.config.errors import InputError
from expertmesh.data import BatchLayout, TokenizedDataset
from expertmesh.step.forward_backward import evaluate_terms
from expertmesh.step.loss import EvaluatedCrossEntropy
from expertmesh.training.evaluation import generate, prompt_of
from expertmesh.training.reporting.metrics import EvalMetrics
from expertmesh.training.resume import Best, Counters, read_counters
from expertmesh.training.run import train
from expertmesh.training.run_state import Selection
from tests.support.models import tiny_model
from tests.support.ranks import run_ranks, shared_ranks
from tests.training.tiny_run import metrics, run_config, write_inputs

LAYOUTS: list[dict[str, Any]] = [{"ep": 2}, {"ep": 2, "tp": 2}, {"ep": 1, "cp": 2}, {"ep": 1, "pp": 2}]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def _batch(model: nn.Module) -> tuple[dict[str, Tensor], int, int, float]:
    """Rows, how many targets they have and how many of these the model chooses, and its loss: every third is its own
    choice. Logits are in bfloat16 steps, so that some are equal.
    """
    ids = torch.randint(1, 90, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    labels = ids.clone()
    labels[:, 1::3] = logits.argmax(-1)[:, 0::3][:, : labels[:, 1::3].shape[1]]
    labels[:, :5] = -100
    target = labels[:, 1:][labels[:, 1:] != -100]
    of_target = logits[:, :-1][labels[:, 1:] != -100]
    hits = int((of_target.argmax(-1) == target).sum())
    loss = float(nn.functional.cross_entropy(of_target.float(), target))
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}, len(target), hits, loss


def _evaluated(model: nn.Module, batch: dict[str, Tensor], targets: int) -> list[list[float]]:
    """In each layout this rank's shares of loss and accuracy."""
    found = []
    for layout in LAYOUTS:
        mesh, own = em.init_mesh(em.ParallelConfig(**layout)), copy.deepcopy(model)
        em.parallelize(own, mesh)  # type: ignore[arg-type]
        mine = {name: tensor[mesh.data_rank :: mesh.layout.data_ranks] for name, tensor in batch.items()}
        terms = evaluate_terms(own.eval(), [mine], EvaluatedCrossEntropy(targets))
        found.append([sum(float(t.loss) for t in terms), sum(float(t.figures_F[0]) for t in terms)])
    return found


def test_accuracy_and_loss_are_the_unsharded_models_in_every_layout() -> None:
    model = tiny_model("qwen3_moe").eval()
    batch, targets, hits, expected = _batch(model)
    assert 0 < hits < targets
    shares = shared_ranks(_evaluated, 2, model, batch, targets)
    for number, layout in enumerate(LAYOUTS):
        loss, accuracy = (sum(rank[number][figure] for rank in shares) for figure in (0, 1))
        assert round(accuracy * targets) == pytest.approx(accuracy * targets) == hits, layout
        assert loss == pytest.approx(expected, rel=1e-5), layout


# Prompts of unequal length, no multiple of the data ranks in number; answers end by length or by a word.
PROMPTS = [[5, 9, 33], [7, 2, 8, 41, 3, 17, 60], [11], [80, 13, 22, 54, 6], [77, 30]]
MOST = [9, 4, 9, 9, 6]


def _answers(model: nn.Module, ends: set[int]) -> list[list[list[int]]]:
    found = []
    for layout in LAYOUTS:
        mesh, own = em.init_mesh(em.ParallelConfig(**layout)), copy.deepcopy(model)
        em.parallelize(own, mesh)  # type: ignore[arg-type]
        form = BatchLayout(2, mesh.data_rank, mesh.layout.data_ranks, True, 0, 16)
        found.append([each.tolist() for each in generate(own, mesh, form, [np.array(p) for p in PROMPTS], MOST, ends)])
        assert own.training
    return found


@pytest.mark.slow(why="that losses are right stays")
def test_answers_are_the_greedy_ones_of_the_unsharded_model_in_every_layout() -> None:
    model: Any = tiny_model("qwen3_moe")

    def by_transformers(prompt: list[int], most: int, **options: Any) -> list[int]:
        ids = torch.tensor([prompt])
        words = model.eval().generate(ids, do_sample=False, max_new_tokens=most, pad_token_id=0, **options)
        return [int(word) for word in words[0, len(prompt) :]]

    free = [by_transformers(*each, eos_token_id=None) for each in zip(PROMPTS, MOST, strict=True)]
    end = free[0][3]
    expected = [by_transformers(*each, eos_token_id=end) for each in zip(PROMPTS, MOST, strict=True)]
    assert len(expected[0]) < MOST[0]
    for rank in shared_ranks(_answers, 2, model.train(), {end}):
        assert rank == [expected] * len(LAYOUTS)


def test_prompts_are_what_is_before_the_last_answer() -> None:
    turns = [False, False, True, True, False, False, True, True, True, False]
    ids = np.arange(10)
    plain = TokenizedDataset.of_samples([ids, ids], [np.array(turns), np.ones(10, bool)])
    assert [part.tolist() for part in prompt_of(plain, 0)] == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]
    assert [part.tolist() for part in prompt_of(plain, 1)] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_named_sets_early_stop_and_the_best_checkpoint(
    inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = inputs / "train.jsonl"
    options = [
        f"data.eval=[{{path: {path}, name: all, max_rows: 5}}, {{path: {path}, name: few, max_rows: 2}}]",
        "train={global_batch_size: 4, eval_every_steps: 1, max_steps: 6, num_epochs: 3, early_stop: {patience: 2}}",
        "optim={name: sgd, learning_rate: 1.0e-30}",  # nothing is learned
        "checkpoint={every_steps: 1, keep_last: 1, keep_best: eval_few_loss}",
        "eval={samples: 2, sample_tokens: 5}",
        "log.every_steps=2",
    ]
    run = tmp_path / "run"
    run_ranks(train, 2, run_config(inputs, run, *options))
    rows = [row for row in metrics(run) if "eval_loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["step"] for row in metrics(run) if "loss" in row] == [2, 3]
    assert "3 steps, " in (run / "model" / "README.md").read_text()
    assert rows[0].keys() >= {"eval_all_loss", "eval_few_token_accuracy", "eval_token_accuracy", "eval_target_tokens"}
    assert rows[0]["eval_all_loss"] != rows[0]["eval_few_loss"]
    between = sorted((rows[0]["eval_all_loss"], rows[0]["eval_few_loss"]))
    assert between[0] < rows[0]["eval_loss"] < between[1]
    assert sorted(each.name for each in (run / "checkpoints").iterdir()) == ["step-00000001", "step-00000003"]
    assert (run / "model" / "config.json").is_file()
    said = capfd.readouterr().out
    assert "stopped early: eval_loss was best (" in said
    assert "after step 1, 2 evaluations ago" in said
    assert "checkpoint step-00000001" in said
    assert "eval few loss " in said
    samples = [row["eval_samples"] for row in rows]
    assert [(each["set"], each["source"].rpartition("/")[2]) for each in samples[0]] == [
        ("all", "train.jsonl:1"), ("all", "train.jsonl:2"), ("few", "train.jsonl:1"), ("few", "train.jsonl:2"),
    ]  # fmt: skip
    assert samples[0][0]["prompt"] == "What is 0 plus 0?"
    assert samples[0][0]["expected"].startswith("It is 0.")
    assert samples[0] == samples[2]
    assert samples[0][0]["answer"] == samples[0][2]["answer"] == _greedy(run / "model", samples[0][0]["prompt"])
    assert 'train.jsonl:1: "What is 0 plus 0?" answered by "' in said


def _greedy(model: Path, prompt: str) -> str:
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    words = AutoModelForCausalLM.from_pretrained(model).generate(ids, do_sample=False, max_new_tokens=5)
    return str(tokenizer.decode(words[0, ids.shape[1] :]))


def _selection(inputs: Path, **keys: Any) -> Selection:
    train = {"eval_every_steps": 1, "early_stop": {"figure": "eval_token_accuracy", "patience": 2, **keys}}
    overrides = [f"train={json.dumps(train)}", f"data.eval=[{{path: {inputs / 'train.jsonl'}}}]"]
    config = run_config(inputs, inputs / "any", *overrides, "checkpoint.keep_best=eval_loss")
    return Selection(config, Counters())


def test_rewards_of_sets_together_are_those_of_all_rows_of_a_kind() -> None:
    """One desirable row of reward 2 in one set, one of 4 beside three undesirable ones of -1 in the other."""

    def of(chosen: float, rejected: float, count: int, loss: float) -> EvalMetrics:
        figures = {"rewards/chosen": chosen, "rewards/rejected": rejected, "rewards/margins": chosen - rejected}
        return EvalMetrics(loss, 10, {**figures, "kl": 0.5}, count, "rows", desirable=1)

    both = EvalMetrics.together({"a": of(2.0, 0.0, 1, 1.0), "b": of(4.0, -1.0, 4, 2.0)})
    assert both.figures == {"rewards/chosen": 3.0, "rewards/rejected": -1.0, "rewards/margins": 4.0, "kl": 0.5}
    assert both.loss == pytest.approx(1.8)


def test_what_is_better_and_how_long_to_wait_for_it(inputs: Path) -> None:
    selection, nan = _selection(inputs, min_change=0.1), float("nan")
    figures = [(3.0, 0.1), (2.0, 0.15), (nan, 0.3), (2.5, nan), (1.0, 0.3)]
    found = [
        (selection.saw(step, {"eval_loss": loss, "eval_token_accuracy": accuracy}), selection.ends())
        for step, (loss, accuracy) in enumerate(figures, start=1)
    ]
    assert found == [(True, False), (True, False), (False, False), (False, False), (True, True)]
    assert selection.counters.best == Best("eval_loss", 1.0, 5)
    assert selection.counters.least == Best("eval_token_accuracy", 0.3, 3)
    saved = json.loads(json.dumps(asdict(selection.counters)))
    assert read_counters(inputs, saved, 0) == selection.counters


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["checkpoint.keep_best=eval_loss"], "set data.eval and train.eval_every_steps"),
        (["train.early_stop={}"], "train.early_stop.figure is eval_loss, but nothing is evaluated"),
        (["checkpoint.keep_best=eval_b_loss", "train.eval_every_steps=1", "EVAL"], "choose from eval_loss, "),
        (["eval.samples=2", "data.eval=[]"], "eval.samples is 2, but data.eval is empty"),
        (["EVAL", "eval.sample_tokens=2"], "eval.sample_tokens does nothing with eval.samples 0"),
        (["data.train.0.name=a"], "data.train.0.name does nothing"),
    ],
)
def test_figures_that_no_evaluation_gives_are_refused(inputs: Path, overrides: list[str], said: str) -> None:
    sets = f"data.eval=[{{path: {inputs / 'train.jsonl'}, name: a}}]"
    with pytest.raises(InputError, match=said):
        run_config(inputs, inputs / "any", *(sets if each == "EVAL" else each for each in overrides))
