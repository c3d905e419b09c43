"""Models whose experts are a list of MLPs: fused in memory, trained exactly, and back on disk as they were."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import expertmesh as em
from expertmesh.anatomy import describe
from expertmesh.config.errors import IntegrityError
from expertmesh.experts.balance import balance_of
from expertmesh.experts.module_list import FusedExperts
from expertmesh.model import parallelize
from expertmesh.weights.load import fill
from expertmesh.weights.meta_model import build_meta_model, materialize, read_model_config
from tests.support.errors import refused
from tests.support.list_models import write_list_model
from tests.support.ranks import shared_ranks

ROWS, LEARNING_RATE, STEPS = 4, 0.5, 2
FP64 = em.PrecisionConfig(params="float64", compute="float64", reduce="float64")


pytestmark = pytest.mark.usefixtures("cache_of_model_code")


def _meta(directory: Path) -> Any:
    config, _ = read_model_config(str(directory), trust_remote_code=True)
    return build_meta_model(config, torch.float32, directory=directory, trust_remote_code=True)


def _rows(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(96, (11 + 3 * row,), generator=generator) for row in range(ROWS)]


def _train_unsharded(directory: Path, target: Path) -> None:
    """SGD in plain torch: what weights lose is the gradient, for every tensor of the files."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, trust_remote_code=True).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        rows = _rows(step)
        for row in rows:
            logits = model(input_ids=row[None]).logits[0]
            loss = F.cross_entropy(logits[:-1], row[1:], reduction="sum") / sum(len(row) - 1 for row in rows)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(target)


def _train_sharded(directory: Path, target: Path, ep: int, dispatch: Any, checkpointing: str, in_memory: bool) -> int:
    mesh = em.init_mesh(em.ParallelConfig(ep=ep), num_experts=8)
    moe = em.MoeConfig(dispatch=dispatch)
    model: Any
    if in_memory:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, trust_remote_code=True).train()
        parallelize(model, mesh, moe=moe, activation_checkpointing=checkpointing)
    else:
        options: dict[str, Any] = {"precision": FP64, "moe": moe, "activation_checkpointing": checkpointing}
        model = em.load_model(directory, mesh, trust_remote_code=True, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        rows = _rows(step)
        for row in rows[mesh.data_rank :: mesh.layout.data_ranks]:
            batch = {"input_ids": row[None], "labels": row[None]}
            em.causal_lm_loss(model, batch, target_tokens=sum(len(row) - 1 for row in rows)).backward()
        optimizer.step()
        optimizer.zero_grad()
    em.save_model(model, target, dtype=None)
    fused = [module for module in model.modules() if isinstance(module, FusedExperts)]
    return sum(part.to_local().numel() for module in fused for part in module.parameters())  # type: ignore[attr-defined]


def _read(directory: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in sorted(directory.glob("*.safetensors")) for k, v in load_file(path).items()}


@pytest.mark.slow_cases(r"plain-1-rank", why="two ranks stay")
@pytest.mark.slow_cases(r"qwen-checkpointed", why="the other ways stay")
@pytest.mark.parametrize(
    ("changes", "world", "ep", "dispatch", "checkpointing", "in_memory"),
    [
        ({"style": "deepseek"}, 2, 2, "all_to_all", "none", False),
        ({"style": "qwen"}, 4, 2, "all_to_all", "selective", False),
        ({"style": "qwen", "expert": "biased"}, 2, 2, "all_to_all", "none", True),
        ({"style": "deepseek", "expert": "plain"}, 1, 1, "auto", "full", False),
    ],
    ids=["deepseek", "qwen-checkpointed", "biased-in-memory", "plain-1-rank"],
)
def test_sharded_training_equals_the_models_own_code_and_its_files(
    tmp_path: Path, changes: dict[str, Any], world: int, ep: int, dispatch: str, checkpointing: str, in_memory: bool
) -> None:
    source, reference, target = (tmp_path / name for name in ("source", "reference", "target"))
    write_list_model(source, **changes)
    _train_unsharded(source, reference)
    held = shared_ranks(_train_sharded, world, source, target, ep, dispatch, checkpointing, in_memory)
    before, expected, got = _read(source), _read(reference), _read(target)
    assert {name: value.shape for name, value in got.items()} == {name: value.shape for name, value in before.items()}
    for name, value in expected.items():
        gradient, ours = value - before[name].double(), got[name] - before[name].double()
        assert gradient.norm() > 0, f"{name}: nothing was trained"
        assert (ours - gradient).norm() <= 1e-10 * gradient.norm(), name
    whole = sum(value.numel() for name, value in before.items() if ".experts." in name)
    assert held == [whole // world] * world


def _padded_losses(directory: Path, lengths: tuple[int, ...]) -> list[float]:
    """Of a batch with and without `real_tokens`, as the trainer gives them."""
    model: Any = em.load_model(directory, em.init_mesh(em.ParallelConfig(ep=2)), trust_remote_code=True, precision=FP64)
    real_BS = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    input_BS = torch.arange(real_BS.numel()).view_as(real_BS) % 96 * real_BS
    batch = {"input_ids": input_BS, "labels": input_BS.masked_fill(~real_BS, -100)}
    losses = []
    for more in ({}, {"real_tokens": real_BS}):
        loss = em.causal_lm_loss(model, {**batch, **more}, target_tokens=sum(lengths) - len(lengths))
        loss.backward()
        losses.append(float(loss.detach()))
    return losses


def test_batches_that_say_which_tokens_are_real_train_too(tmp_path: Path) -> None:
    write_list_model(tmp_path / "source")
    for without, told in shared_ranks(_padded_losses, 2, tmp_path / "source", (9, 4)):
        assert told == without > 0


def test_an_update_of_router_biases_is_refused_because_padding_is_counted(tmp_path: Path) -> None:
    write_list_model(tmp_path / "source")
    model = _meta(tmp_path / "source")
    block = model.model.layers[0].mlp
    block.e_score_correction_bias = nn.Parameter(torch.zeros(8), requires_grad=False)
    with refused("moe.router-bias-of-list", naming="layers.0.mlp.experts"):
        balance_of(model, describe(model), em.MoeConfig(bias_update_rate=0.1))


def test_what_is_loaded_and_saved_again_is_the_same_bytes(tmp_path: Path) -> None:
    write_list_model(tmp_path / "source")
    model = _meta(tmp_path / "source")
    materialize(model, "cpu")
    fill(model, tmp_path / "source")
    em.save_model(model, tmp_path / "target")
    before, after = _read(tmp_path / "source"), _read(tmp_path / "target")
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    AutoModelForCausalLM.from_pretrained(tmp_path / "target", trust_remote_code=True)


@pytest.mark.parametrize(
    ("changes", "key", "naming"),
    [
        ({"expert": "residual"}, "model.unsupported-expert-list", "layers.0.mlp.experts is a list of ResidualMLP"),
        ({"aux_loss_alpha": 0.1}, "model.experts-not-weighted-sum", "adds a loss of its own in backward"),
        ({"style": "chain"}, "model.experts-not-weighted-sum", "gave its experts other tokens when it was run"),
        ({"style": "reading"}, "model.experts-not-weighted-sum", "cannot be run on a small copy"),
        ({"style": "counting"}, "model.experts-not-weighted-sum", "does not give the same result"),
    ],
    ids=["not-an-mlp", "auxiliary-loss", "chained-experts", "weights-read", "state-counted-twice"],
)
def test_what_cannot_be_fused_exactly_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], key: str, naming: str
) -> None:
    write_list_model(tmp_path / "source", **changes)
    with refused(key, naming=naming):
        _meta(tmp_path / "source")


def test_members_of_different_structure_are_refused_by_name(tmp_path: Path) -> None:
    model = write_list_model(tmp_path / "source")
    model.model.layers[1].mlp.experts[3].act_fn = nn.GELU()
    with refused("model.unsupported-expert-list", naming="model.layers.1.mlp.experts.3: differs in structure"):
        em.parallelize(model, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "problem"),
    [("experts.3.up_proj", "incomplete"), ("experts.7.down_proj", "misshaped")],
    ids=["one-in-the-middle", "the-last-one"],
)
def test_an_expert_that_the_files_lack_is_an_error_with_its_name(tmp_path: Path, name: str, problem: str) -> None:
    write_list_model(tmp_path / "source")
    tensors = _read(tmp_path / "source")
    del tensors[f"model.layers.1.mlp.{name}.weight"]
    save_file(tensors, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    model = _meta(tmp_path / "source")
    materialize(model, "cpu")
    with refused("weights.does-not-fit", IntegrityError, naming=f"1 {problem} (model.layers.1.mlp.experts"):
        fill(model, tmp_path / "source")
