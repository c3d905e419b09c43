"""Distillation in every layout equals the unsharded model and the unsharded teacher, in fp64, with the plain KL."""

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import expertmesh as em
from expertmesh.config import Config
from expertmesh.data import IGNORE, BatchLayout, Recipe, build_dataset
from expertmesh.state.shards import local_tensor
from expertmesh.step import loss as step_loss
from expertmesh.step.forward_backward import run_step
from expertmesh.step.loss import count_targets, head_logits
from expertmesh.step.objectives import Distill
from expertmesh.training import loop
from expertmesh.training.objective import Teacher
from expertmesh.training.run import train
from expertmesh.verification.reference import unsharded
from tests.support.ranks import shared_ranks
from tests.support.reference import worst
from tests.training.dpo_by_trl import ByTrl
from tests.training.test_dpo_parity import ADAPTED, LAYOUTS, LORA, train_keeping_gradients
from tests.training.tiny_run import metrics, run_config, write_inputs

TOLERANCE = 1e-10
EXACT = ["precision={params: float64, compute: float64, reduce: float64}", "optim.eps=1.0e-4"]
OTHERS = {
    "by layer": (2, ["parallel.ep=2", "train.accumulate=by_layer"]),
    "rounds": (2, ["parallel.ep=2", "train.accumulate=by_layer", "train.round=1", "train.global_batch_size=8"]),
    "packed": (2, ["parallel.cp=2", "data.packing=true"]),
    "interleaved": (2, ["parallel.pp=2", "parallel.ep=1", "parallel.pp_virtual_stages=2"]),
}
# What one axis alone has, dpo and sft have as well.
WHOLE = {**{name: LAYOUTS[name] for name in ("one rank", "tp", "pp", "all", "replicas of ep")}, **OTHERS}
STEPS = 3
CHUNK = 5  # of targets: several of each micro-batch, and a part of one at its end


def options(inputs: Path, **changes: Any) -> str:
    chosen = {"teacher": str(inputs / "teacher" / "model"), "temperature": 2.0, "sft_weight": 0.25, **changes}
    return f"objective={json.dumps({'name': 'distill', **chosen})}"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four blocks, and a larger teacher with other experts; all in fp64."""
    root = write_inputs(tmp_path_factory.mktemp("inputs"), num_hidden_layers=4)
    larger = {"num_hidden_layers": 5, "hidden_size": 48, "num_experts": 16, "moe_intermediate_size": 24}
    write_inputs(root / "teacher", **larger)
    for model in (root / "model", root / "teacher" / "model"):
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).save_pretrained(model)
    return root


def distill_config(inputs: Path, output: Path, *overrides: str) -> Config:
    constant = ["schedule={name: constant, warmup_ratio: 0.0}", "optim.learning_rate=3.0e-4"]
    return run_config(inputs, output, *constant, f"train.max_steps={STEPS}", *overrides)


def samples_of_steps(config: Config) -> Iterator[list[unsharded.Sample]]:
    """The samples of each step, by the rows of one data rank that has them all."""
    tokenizer = AutoTokenizer.from_pretrained(config.model.name_or_path)
    dataset, _ = build_dataset(Recipe(config.data.train, config.data, tokenizer, model_vocab_size=len(tokenizer)))
    form = BatchLayout(1, 0, 1, config.data.packing, 0, config.data.max_length)
    rows, size = form.plan(dataset, np.arange(len(dataset))).rows, config.train.global_batch_size
    for start in range(0, min(len(rows), STEPS * size), size):
        found = [dataset.sample(index) for row in rows[start : start + size] for index in row.tolist()]
        yield [(torch.from_numpy(each.input_ids), torch.from_numpy(each.labels)) for each in found]


def plain_losses(config: Config, model: Any, teacher: Any, samples: list[unsharded.Sample]) -> Tensor:
    """The loss of each target, written out from probabilities."""
    batch, objective = unsharded.PaddedSamples.of(samples), config.objective
    logits, token_losses = unsharded.forward(model, batch)
    with torch.no_grad():
        other_logits, _ = unsharded.forward(teacher, batch)
    got = unsharded.distillation_losses(logits, token_losses, other_logits, batch, objective)
    predicting = batch.labels_BS[:, 1:] != IGNORE
    own, other = ((each[:, :-1][predicting] / 2.0).softmax(-1) for each in (logits, other_logits))
    of, under = (own, other) if objective.kl == "reverse" else (other, own)
    plain = (of * (of / under).log()).sum(-1)
    torch.testing.assert_close(got, 4.0 * plain + 0.25 * token_losses, rtol=1e-9, atol=1e-12)
    return got


@pytest.fixture(scope="module")
def by_hand(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ByTrl]:
    scratch = tmp_path_factory.mktemp("by hand")

    @cache
    def train_once(*overrides: str) -> ByTrl:
        config = distill_config(inputs, scratch / "run", *EXACT, *overrides)
        optim = config.optim
        load = AutoModelForCausalLM.from_pretrained
        model, teacher = (
            load(name, dtype=torch.float64, experts_implementation="eager")
            for name in (config.model.name_or_path, config.objective.teacher)
        )
        if config.lora is not None:
            shared_ranks(start_adapter, 1, config, scratch / "start")
            model = peft.PeftModel.from_pretrained(
                model, str(scratch / "start"), is_trainable=True, autocast_adapter_dtype=False
            )
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        optimizer = torch.optim.AdamW(
            trained.values(), lr=optim.learning_rate, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay
        )
        rows: list[dict[str, float]] = []
        gradients: dict[str, Tensor] = {}
        for samples in samples_of_steps(config):
            loss = plain_losses(config, model, teacher, samples).mean()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(list(trained.values()), optim.max_grad_norm or torch.inf)
            gradients = gradients or {n: p.grad.clone() for n, p in trained.items() if p.grad is not None}
            rows.append({"loss": float(loss.detach()), "grad_norm": float(norm)})
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            every = [sample for samples in samples_of_steps(config) for sample in samples]
            evaluation = {"eval_loss": float(plain_losses(config, model, teacher, every).mean())}
        return ByTrl(rows, evaluation, gradients, {name: p.detach().clone() for name, p in trained.items()})

    return train_once


def start_adapter(config: Config, directory: Path) -> None:
    """Write the adapter that a run of `config` starts from."""
    mesh = em.init_mesh(em.ParallelConfig(ep=1))
    model = em.load_model(config.model.name_or_path, mesh, lora=config.lora, precision=config.precision)
    em.save_adapter(model, directory)


def train_beside_a_teacher(config: Config, tamper: Callable[[], Any] | None = None) -> dict[str, Tensor]:
    """The run and its gradients. The teacher's parameters have none, and stay as they were read; no more logits than a
    chunk's exist at once.
    """
    teachers: list[tuple[Teacher, list[Tensor]]] = []
    load = Teacher.load

    def keeping(teacher: Teacher, *args: Any) -> None:
        load(teacher, *args)
        teachers.append((teacher, [local_tensor(each).clone() for each in teacher.model.parameters()]))

    def in_chunks(*args: Any, **kwargs: Any) -> Any:
        return run_step(*args, chunk_tokens=CHUNK, **kwargs)

    def few_logits(model: Any, hidden_CH: Tensor, *output: Any) -> Tensor:
        assert len(hidden_CH) <= CHUNK
        return head_logits(model, hidden_CH, *output)

    patched = (
        mock.patch.object(Teacher, "load", keeping),
        mock.patch.object(loop, "run_step", in_chunks),
        mock.patch.object(step_loss, "head_logits", few_logits),
    )
    with patched[0], patched[1], patched[2] if not config.data.eval else nullcontext():
        gradients = train_keeping_gradients(config, tamper)
    ((teacher, before),) = teachers
    for parameter, value in zip(teacher.model.parameters(), before, strict=True):
        assert parameter.grad is None
        assert not parameter.requires_grad
        assert torch.equal(local_tensor(parameter), value)
    return gradients


def check(output: Path, gradients: dict[str, Tensor], expected: ByTrl) -> None:
    """Loss and gradient norm of every step, every gradient, the weights at the end."""
    rows = [row for row in metrics(output) if "loss" in row]
    assert len(rows) == len(expected.rows)
    for row, want in zip(rows, expected.rows, strict=True):
        assert row["loss"] == pytest.approx(want["loss"], rel=TOLERANCE), row["step"]
        assert row["grad_norm"] == pytest.approx(want["grad_norm"], rel=TOLERANCE), row["step"]
    adapter = output / "adapter" / "adapter_model.safetensors"
    trained = load_file(adapter if adapter.exists() else output / "model" / "model.safetensors")
    wanted = [
        {name.replace(".default.", "."): tensor for name, tensor in tensors.items()}
        for tensors in (expected.gradients, expected.weights)
    ]
    if not adapter.exists():
        trained = dict(AutoModelForCausalLM.from_pretrained(output / "model").named_parameters())
    assert worst(gradients, wanted[0])[0] <= TOLERANCE, worst(gradients, wanted[0])
    assert worst(trained, wanted[1])[0] <= TOLERANCE, worst(trained, wanted[1])


@pytest.mark.slow_cases(r"(?!by layer).*", why="the other order stays, with experts on two ranks")
@pytest.mark.parametrize("layout", WHOLE)
def test_every_layout_equals_the_unsharded_models(
    inputs: Path, tmp_path: Path, by_hand: Callable[..., ByTrl], layout: str
) -> None:
    world, chosen = WHOLE[layout]
    kl = "reverse" if layout in ("tp", "pp", "by layer") else "forward"
    own = [options(inputs, kl=kl), *(each for each in chosen if each.startswith(("data.", "train.global")))]
    config = distill_config(inputs, tmp_path / "run", *EXACT, *own, *chosen)
    check(tmp_path / "run", shared_ranks(train_beside_a_teacher, world, config)[0], by_hand(*own))


@pytest.mark.slow(why="the whole model's layouts stay")
@pytest.mark.parametrize("layout", ["replicate", "tp", "all", "by layer"])
def test_adapters_equal_stock_pefts(inputs: Path, tmp_path: Path, by_hand: Callable[..., ByTrl], layout: str) -> None:
    world, chosen = {**ADAPTED, **OTHERS}[layout]
    own = [options(inputs, kl="reverse"), LORA]
    config = distill_config(inputs, tmp_path / "run", *EXACT, *own, *chosen)
    check(tmp_path / "run", shared_ranks(train_beside_a_teacher, world, config)[0], by_hand(*own))


@pytest.mark.slow(why="the steps of the layouts stay")
@pytest.mark.parametrize("world_and_layout", [(2, "parallel.pp=2"), (4, "parallel.tp=2")])
def test_an_evaluation_has_the_plain_loss(
    inputs: Path, tmp_path: Path, by_hand: Callable[..., ByTrl], world_and_layout: tuple[int, str]
) -> None:
    world, layout = world_and_layout
    rows = (inputs / "train.jsonl").read_text().splitlines(keepends=True)
    (inputs / "eval.jsonl").write_text("".join(rows[: STEPS * 4]))
    own = options(inputs)
    config = distill_config(
        inputs, tmp_path / "run", *EXACT, own, layout, f"data.eval=[{{path: {inputs / 'eval.jsonl'}}}]"
    )
    shared_ranks(train, world, config)
    row = metrics(tmp_path / "run")[-1]
    assert row["eval_loss"] == pytest.approx(by_hand(own).evaluation["eval_loss"], rel=TOLERANCE)


def temperature_not_squared() -> None:
    plain = step_loss.divergence
    step_loss.divergence = lambda *args, **given: plain(*args, **given) / given["temperature"]  # type: ignore[assignment]


def divergence_the_other_way() -> None:
    plain = step_loss.divergence
    step_loss.divergence = lambda *args, **given: plain(*args, **{**given, "reverse": not given["reverse"]})  # type: ignore[assignment]


def targets_of_this_rank() -> None:
    term = Distill.term
    Distill.term = lambda self, losses, batch: term(replace(self, count=count_targets(batch["labels"])), losses, batch)  # type: ignore[method-assign]


@pytest.mark.slow_cases(r"(?!targets).*", why="the normalisation stays")
@pytest.mark.parametrize("bug", [temperature_not_squared, divergence_the_other_way, targets_of_this_rank])
def test_a_planted_bug_is_seen(
    inputs: Path, tmp_path: Path, by_hand: Callable[..., ByTrl], bug: Callable[[], None]
) -> None:
    own = options(inputs)
    config = distill_config(inputs, tmp_path / "run", *EXACT, own, "parallel.ep=2")
    gradients = shared_ranks(train_keeping_gradients, 2, config, bug)[0]
    assert worst(gradients, by_hand(own).gradients)[0] > 1e-3
    with pytest.raises(AssertionError):
        check(tmp_path / "run", gradients, by_hand(own))
