"""The streamed reference is the whole model's own result, with the weights of one block in memory at a time."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from expertmesh.verification.job import build
from expertmesh.verification.options import VerifyOptions
from expertmesh.verification.reference import unsharded
from expertmesh.verification.reference.model import Expected, Reference
from expertmesh.verification.reference.streaming import Weights
from expertmesh.verification.setup import Setup, set_up
from tests.support.ranks import run_ranks, shared_ranks
from tests.support.reference import add_gradients
from tests.training.tiny_run import run_config, write_inputs

FAMILIES = ["qwen3_moe", "deepseek_v3"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    for family in FAMILIES:
        write_inputs(root / family, family)
    return root


def _setup(inputs: Path, family: str, world: int, *overrides: str) -> Setup:
    return set_up(run_config(inputs / family, inputs / "out", *overrides), VerifyOptions(tokens=256), world)


def _whole(directory: Path, setup: Setup) -> tuple[float, dict[str, Tensor]]:
    """Sample by sample through `from_pretrained`'s model: the loss of the step and every gradient."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train()
    model.config._experts_implementation = "eager"
    data, total = setup.steps[0], 0.0
    for index in range(len(data.dataset)):
        sample = data.dataset.sample(index)
        logits = model(input_ids=torch.from_numpy(sample.input_ids)[None], use_cache=False).logits[0]
        loss = F.cross_entropy(logits[:-1], torch.from_numpy(sample.labels)[1:], reduction="sum") / data.targets
        loss.backward()
        total += float(loss.detach())
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


def _expected(setup: Setup) -> Expected:
    return Reference(build(setup), torch.float32).run(setup.steps[0])


@pytest.mark.slow_cases(r"(1-deepseek_v3|2-qwen3_moe)", why="pairwise over families and ranks")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("world", [1, 2])
def test_loss_and_every_gradient_are_those_of_the_whole_model(inputs: Path, family: str, world: int) -> None:
    setup = _setup(inputs, family, world, "data.packing=true", "parallel.ep=1")
    loss, gradients = _whole(inputs / family / "model", setup)
    for rank, expected in enumerate(shared_ranks(_expected, world, setup)):
        assert expected.losses.loss == pytest.approx(loss, rel=1e-6)
        assert expected.squares.keys() == gradients.keys()
        for name, square in expected.squares.items():
            assert square**0.5 == pytest.approx(float(gradients[name].norm()), rel=1e-5), name
        for name, part in expected.gradients.items():
            whole = gradients[name]
            rows = whole.shape[0] // world if part.shape != whole.shape else whole.shape[0]
            own = whole[rank * rows :][: part.shape[0]] if part.shape[0] < whole.shape[0] else whole
            assert torch.allclose(part, own, rtol=1e-4, atol=1e-6), name


@pytest.mark.slow_cases(r"qwen3_moe", why="another family stays")
@pytest.mark.parametrize("family", FAMILIES)
def test_in_one_process_each_sample_by_itself_gives_the_same(inputs: Path, family: str) -> None:
    setup = _setup(inputs, family, 1, "parallel.ep=1")
    loss, gradients = _whole(inputs / family / "model", setup)
    model: Any = AutoModelForCausalLM.from_pretrained(inputs / family / "model", dtype=torch.float32).train()
    model.set_experts_implementation("eager")
    samples = [(placed.input_ids, placed.labels) for placed in setup.steps[0].placed(setup.layout, 0)]
    assert add_gradients(model, samples) == pytest.approx(loss, rel=1e-6)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6), name


def test_a_norm_is_right_however_many_elements_it_is_of_and_clips() -> None:
    gradient = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    weight = nn.Parameter(torch.zeros_like(gradient))

    def backward(step: int) -> float:
        weight.grad = gradient.clone()
        return 0.0

    run = unsharded.train({"w": weight}, torch.optim.SGD([weight], lr=1.0), range(1), backward, max_norm=0.5)
    norm = float(gradient.double().norm())
    assert run.norms == [pytest.approx(norm, rel=1e-12)]
    assert torch.equal(run.gradients["w"], gradient)
    assert torch.allclose(weight.double(), -0.5 / norm * gradient.double(), rtol=1e-6)


def _most_blocks_alive(setup: Setup) -> int:
    alive: list[tuple[str, weakref.ref[torch.UntypedStorage]]] = []
    most = 0
    leaves = Weights.leaves

    def counting(self: Weights, name: str) -> dict[str, Tensor]:
        nonlocal most
        found = leaves(self, name)
        alive.append((name, weakref.ref(found[name].untyped_storage())))
        blocks = [block for block in setup.anatomy.blocks for n, r in alive if r() is not None and n.startswith(block)]
        most = max(most, len(set(blocks)))
        return found

    Weights.leaves = counting  # type: ignore[method-assign]  # in a forked rank, which ends after this
    _expected(setup)
    return most


def test_the_weights_of_one_block_are_in_memory_at_a_time(inputs: Path) -> None:
    assert run_ranks(_most_blocks_alive, 1, _setup(inputs, "qwen3_moe", 1, "parallel.ep=1")) == [1]


def _router_losses(setup: Setup) -> tuple[float | None, float | None]:
    expected = _expected(setup)
    return expected.losses.aux_loss, expected.losses.z_loss


def test_router_losses_are_of_the_whole_step_whatever_the_ranks(inputs: Path) -> None:
    overrides = ("moe.aux_loss_coef=0.01", "moe.z_loss_coef=0.1", "parallel.ep=1", "train.global_batch_size=4")
    alone = shared_ranks(_router_losses, 1, _setup(inputs, "qwen3_moe", 1, *overrides, "train.micro_batch_size=2"))[0]
    for other in shared_ranks(_router_losses, 2, _setup(inputs, "qwen3_moe", 2, *overrides)):
        assert other == pytest.approx(alone, rel=1e-6)
