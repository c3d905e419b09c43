"""What distillation refuses, by name and before weights are read; its divergence; a run that goes on."""

import json
import math
from pathlib import Path

import pytest
import torch

import expertmesh as em
from expertmesh.config import Config
from expertmesh.config.errors import InputError
from expertmesh.planning.forecast import devices_here, forecast
from expertmesh.planning.read_model import figures_of_plan, figures_of_teacher
from expertmesh.planning.search import Job, evaluate
from expertmesh.planning.stages import Batch, resident_state
from expertmesh.state.shards import local_tensor
from expertmesh.step.vocabulary import divergence
from expertmesh.training.run import train
from expertmesh.training.startup.preflight import preflight
from tests.support.ranks import shared_ranks
from tests.training.tiny_run import rows_without_times, run_config, train_steps, write_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_inputs(tmp_path_factory.mktemp("inputs"))
    write_inputs(root / "teacher", num_experts=6, num_attention_heads=3, num_key_value_heads=3, num_hidden_layers=1)
    return root


def distill_config(inputs: Path, output: Path, *overrides: str, teacher: str = "teacher/model") -> Config:
    objective = {"name": "distill", "teacher": str(inputs / teacher), "temperature": 2.0}
    return run_config(inputs, output, f"objective={json.dumps(objective)}", *overrides)


def test_a_teacher_of_another_vocabulary_is_refused(inputs: Path, tmp_path: Path) -> None:
    path = inputs / "teacher" / "model" / "config.json"
    other = json.loads(path.read_text()) | {"vocab_size": 640}
    (inputs / "other").mkdir()
    (inputs / "other" / "config.json").write_text(json.dumps(other))
    # Weights that cannot be read: nothing looks at them.
    (inputs / "other" / "model.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match=r"^objective.teacher .*other: its vocabulary has 640 tokens") as refused:
        preflight(distill_config(inputs, tmp_path / "run", teacher="other"), 1)
    assert refused.value.key == "model.other-vocabulary"


@pytest.mark.parametrize(
    ("world", "override", "named"),
    [
        (4, "parallel.ep=4", "parallel.ep"),
        (2, "parallel.tp=2", "parallel.tp"),
        (2, "parallel.pp=2", "parallel.pp"),
    ],
)
def test_a_layout_that_the_teacher_cannot_have_is_refused(
    inputs: Path, tmp_path: Path, world: int, override: str, named: str
) -> None:
    config = distill_config(inputs, tmp_path / "run", override, "train.global_batch_size=8")
    with pytest.raises(InputError, match=rf"^objective\.teacher .*{named}"):
        preflight(config, world)


@pytest.mark.parametrize(
    ("objective", "sentence"),
    [
        ("objective={name: distill}", "objective.teacher is not set"),
        ("objective={name: sft, teacher: some/model}", "objective.teacher does nothing with objective.name sft"),
        ("objective={name: distill, teacher: some/model, beta: 0.2}", "objective.beta does nothing with"),
        ("objective={name: distill, teacher: some/model, temperature: 0}", "objective.temperature"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(inputs: Path, tmp_path: Path, objective: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        run_config(inputs, tmp_path / "run", objective)


def test_a_teacher_and_deepep_are_refused(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"moe\.dispatch is deepep"):
        distill_config(inputs, tmp_path / "run", "moe.dispatch=deepep")


def test_a_frozen_format_needs_a_teacher_or_adapters(inputs: Path, tmp_path: Path) -> None:
    assert distill_config(inputs, tmp_path / "run", "precision.frozen=nf4").trained_precision.frozen is None
    with pytest.raises(InputError, match=r"precision\.frozen is nf4, but"):
        run_config(inputs, tmp_path / "run", "precision.frozen=nf4")


@pytest.mark.parametrize("reverse", [False, True])
def test_the_divergence_has_torchs_value_and_gradient(reverse: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    own, teacher = (torch.randn(4, 9, generator=generator, dtype=torch.float64) for _ in range(2))
    own, teacher = own.requires_grad_(), 3 * teacher
    got = divergence(own, teacher, temperature=1.7, reverse=reverse, group=None)
    (gradient,) = torch.autograd.grad(got.sum(), own)
    logs = [(each / 1.7).log_softmax(-1) for each in (own, teacher)]
    of, under = logs if reverse else logs[::-1]
    want = 1.7**2 * (of.exp() * (of - under)).sum(-1)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(gradient, torch.autograd.grad(want.sum(), own)[0], rtol=1e-10, atol=1e-12)
    assert not divergence(own.detach(), own.detach(), temperature=1.7, reverse=reverse, group=None).any()


@pytest.mark.parametrize("reverse", [False, True])
def test_words_without_probability_do_not_count(reverse: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    own, teacher = (torch.randn(4, 9, generator=generator, dtype=torch.float64) for _ in range(2))
    cut = [each[:, :7].clone().requires_grad_() for each in (own, teacher)]
    for each in (own, teacher):
        each[:, 7:] = -math.inf
    own.requires_grad_()
    got, want = (divergence(*both, temperature=1.0, reverse=reverse, group=None) for both in ((own, teacher), cut))
    torch.testing.assert_close(got, want)
    gradients = [torch.autograd.grad(value.sum(), of)[0] for value, of in ((got, own), (want, cut[0]))]
    torch.testing.assert_close(gradients[0][:, :7], gradients[1])
    assert not gradients[0][:, 7:].any()


def _held_and_predicted(config: Config, world: int) -> tuple[float, float]:
    """The bytes of the teacher that this rank holds, and those that the planner counts for the first rank of its
    stage.
    """
    checked = preflight(config, world)
    teacher = checked.objective.teacher
    assert teacher is not None
    figures = figures_of_teacher(teacher, length=64, packed=False, device="cpu")
    assert figures is not None
    mesh = em.init_mesh(config.parallel)
    predicted = resident_state(figures, checked.layout, mesh.coordinate("pp")).frozen
    teacher.shard(mesh)
    teacher.load(mesh, "sampled")
    return float(sum(local_tensor(each).nbytes for each in teacher.model.parameters())), predicted


@pytest.mark.slow_cases(r".*(ep: 2).*", why="stages stay")
@pytest.mark.parametrize("layout", ["{ep: 2}", "{pp: 2, ep: 1}", "{tp: 2, ep: 2}"])
def test_the_planner_counts_what_ranks_hold_of_a_teacher(inputs: Path, tmp_path: Path, layout: str) -> None:
    large = write_inputs(tmp_path / "large", num_experts=16, num_hidden_layers=3, hidden_size=48)
    config = distill_config(inputs, tmp_path / "run", f"parallel={layout}", teacher=str(large / "model"))
    found = shared_ranks(_held_and_predicted, 2, config, 2)
    for held, predicted in found:
        assert held == pytest.approx(predicted, rel=0.01)
    checked, devices = preflight(config, 2), devices_here(2)
    assert devices is not None
    of_model, of_teacher = (
        figures_of_plan(plan, length=64, lora=None, packed=False, device="cpu")
        for plan in (checked.plan, checked.objective.teacher.plan)
    )
    planned = evaluate(Job(of_model, devices, 4, teacher=of_teacher), checked.layout, "none", Batch(1, 2))
    assert planned.memory.frozen in [predicted for _, predicted in found]
    with_teacher, without = (
        forecast(each, preflight(each, 2)).prediction
        for each in (config, run_config(inputs, tmp_path / "sft", f"parallel={layout}"))
    )
    assert with_teacher is not None
    assert without is not None
    assert with_teacher.peak_memory_bytes - without.peak_memory_bytes > predicted
    assert with_teacher.step_seconds is None


@pytest.mark.slow(why="what a checkpoint holds is not the objective's")
def test_a_run_that_goes_on_equals_one_without_a_stop(inputs: Path, tmp_path: Path) -> None:
    whole, stopped = (distill_config(inputs, tmp_path / name, "parallel.ep=2") for name in ("whole", "stopped"))
    shared_ranks(train, 2, whole)
    shared_ranks(train_steps, 2, stopped, 2)
    shared_ranks(train, 2, stopped)
    assert rows_without_times(tmp_path / "stopped") == rows_without_times(tmp_path / "whole")
