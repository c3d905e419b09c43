"""A sequence classifier from the files of a language model: what `from_pretrained` makes of them, in every layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForSequenceClassification

import expertmesh as em
from expertmesh.weights.first_values import first_head
from tests.support.errors import refused_on_ranks
from tests.support.models import tiny_model
from tests.support.ranks import shared_ranks

FP32 = em.PrecisionConfig(params="float32", compute="float32", reduce="float32")
IDS_BS = torch.randint(1, 96, (3, 8), generator=torch.Generator().manual_seed(1))


def _loaded(directory: Path, seed: int, **parallel: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    mesh = em.init_mesh(em.ParallelConfig(**parallel))
    model: Any = em.load_model(directory, mesh, precision=FP32, num_labels=3, seed=seed)
    model.config.pad_token_id = 0
    logits_BL = model(input_ids=IDS_BS).logits.detach()
    parameters = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    return {name: value.detach().clone() for name, value in parameters.items()}, logits_BL


@pytest.mark.slow_cases(r"(qwen3_moe|mixtral)-.*", why="two families stay")
@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen3_moe", {"tie_word_embeddings": True}), ("gpt_oss", {}), ("deepseek_v3", {}), ("mixtral", {})],
)
def test_weights_and_a_new_head_are_those_of_from_pretrained(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    tiny_model(family, **changes).save_pretrained(tmp_path)
    torch.manual_seed(5)
    auto: Any = AutoModelForSequenceClassification
    expected = auto.from_pretrained(tmp_path, num_labels=3, dtype=torch.float32, experts_implementation="eager")
    expected.config.pad_token_id = 0
    for parameters, logits_BL in shared_ranks(lambda: _loaded(tmp_path, 5, ep=2), 2):
        assert parameters.keys() == dict(expected.named_parameters()).keys()
        assert all(torch.equal(parameters[name], value) for name, value in expected.named_parameters())
        torch.testing.assert_close(logits_BL, expected(input_ids=IDS_BS).logits, rtol=1e-5, atol=1e-6)


def test_drawing_a_new_head_leaves_the_random_state_as_it_is() -> None:
    model = AutoModelForSequenceClassification.from_config(tiny_model("qwen3_moe").config)
    before = torch.get_rng_state()
    first = first_head(model, ["score.weight"], seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert torch.equal(first_head(model, ["score.weight"], seed=5)["score.weight"], first["score.weight"])


def test_what_a_classifier_cannot_do_is_refused(tmp_path: Path) -> None:
    for family in ("olmoe", "qwen3_moe"):
        tiny_model(family).save_pretrained(tmp_path / family)

    with refused_on_ranks("model.no-classifier", naming="olmoe"):
        shared_ranks(lambda: em.load_model(tmp_path / "olmoe", em.init_mesh(em.ParallelConfig(ep=1)), num_labels=1), 1)
    with refused_on_ranks("config.wrong-value", naming="num_labels is 0"):
        shared_ranks(lambda: em.load_model(tmp_path / "qwen3_moe", em.init_mesh(em.ParallelConfig()), num_labels=0), 1)
