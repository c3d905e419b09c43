"""`ep_implementation="expertmesh"` in transformers' own expert parallelism computes what DDP on the whole model does.

Real gloo ranks, other and unevenly many rows on each; every gradient, also next to transformers' own `all_to_all`.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.expert_parallel import EPImplementationInterface

from expertmesh.integrations import transformers_ep
from expertmesh.integrations.transformers_ep import ExpertmeshEP
from tests.support.errors import refused
from tests.support.models import tiny_model
from tests.support.ranks import shared_ranks
from tests.support.reference import full, padded, rows_of_step, worst

Gradients = dict[str, torch.Tensor]


def _backward(model: Any, named: Any) -> tuple[float, Gradients]:
    rank = dist.get_rank()
    batch = padded(rows_of_step(0, ())[rank : 2 * rank + 1])
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return float(loss.detach()), {name: full(parameter.grad) for name, parameter in named.named_parameters()}


def _distributed(source: Path, implementation: str, **sizes: int) -> Any:
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    config = DistributedConfig(ep_implementation=implementation, **sizes)  # type: ignore[arg-type]
    return AutoModelForCausalLM.from_pretrained(source, distributed_config=config, dtype=torch.float32).train()


def _compare(source: Path, ep: int) -> tuple[float, float, float]:
    """Loss, worst gradient against DDP, worst gradient of transformers' own against DDP; relative."""
    whole: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).train()
    loss, expected = _backward(DistributedDataParallel(whole), whole)
    world = dist.get_world_size()
    ours = _distributed(source, "expertmesh", fsdp_size=world, ep_size=ep)
    own_loss, gradients = _backward(ours, ours)
    theirs = _distributed(source, "all_to_all", fsdp_size=world, ep_size=ep)
    _, others = _backward(theirs, theirs)
    return abs(own_loss / loss - 1), worst(gradients, expected)[0], worst(others, expected)[0]


@pytest.mark.slow_cases(r"(qwen3_moe|mixtral)-2-2", why="four ranks in two groups stay")
@pytest.mark.parametrize(("family", "world", "ep"), [("qwen3_moe", 2, 2), ("qwen3_moe", 4, 2), ("mixtral", 2, 2)])
def test_every_gradient_is_ddps(family: str, world: int, ep: int, tmp_path: Path) -> None:
    model: Any = tiny_model(family)
    model.save_pretrained(tmp_path)
    for loss, ours, theirs in shared_ranks(_compare, world, tmp_path, ep):
        assert loss <= 1e-5
        assert ours <= 1e-5
        assert theirs <= 1e-5


def _swapped(source: Path) -> tuple[float, float, float]:
    class Swapped(ExpertmeshEP):
        def __call__(self, hidden: Any, index_TK: Any, weight_TK: Any) -> Any:
            return super().__call__(hidden, torch.where(index_TK < 2, 1 - index_TK, index_TK), weight_TK)

    EPImplementationInterface.register("expertmesh", Swapped)
    return _compare(source, 2)


def test_two_experts_in_each_others_place_are_caught(tmp_path: Path) -> None:
    model: Any = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    assert all(gradient > 1e-2 for _, gradient, _ in shared_ranks(_swapped, 2, tmp_path))


def _with_tp(source: Path) -> None:
    with refused("layout.ep-implementation", naming="tp_size is 2"):
        _distributed(source, "expertmesh", tp_size=2, ep_size=2)


def test_ranks_that_hold_the_same_tokens_are_refused(tmp_path: Path) -> None:
    model: Any = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    shared_ranks(_with_tp, 2, tmp_path)
    assert transformers_ep.NAME in EPImplementationInterface()
