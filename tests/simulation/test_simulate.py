"""One rank of 64 on fake tensors holds and sends what the formulas say, by the product's own code."""

import pytest

from expertmesh.config import LoraConfig, ParallelConfig, PrecisionConfig
from expertmesh.config.errors import InputError
from expertmesh.mesh import resolve_layout
from expertmesh.planning.facts import facts_of
from expertmesh.planning.memory import Batch, memory_of
from expertmesh.planning.state import Mode
from expertmesh.planning.traffic import traffic_of
from expertmesh.simulation.run import simulate
from expertmesh.simulation.shapes import deepseek_v3, qwen3_30b_a3b

LENGTH = 1024


@pytest.mark.parametrize(
    ("shape", "parallel", "mode", "lora"),
    [
        ("qwen", ParallelConfig(ep=8), "full", None),
        ("qwen", ParallelConfig(ep=8, replicate=2), "none", LoraConfig()),
        ("deepseek", ParallelConfig(ep=16), "full", None),
    ],
)
def test_simulated_rank_of_64_is_what_the_formulas_say(
    shape: str, parallel: ParallelConfig, mode: Mode, lora: LoraConfig | None
) -> None:
    config = qwen3_30b_a3b() if shape == "qwen" else deepseek_v3()
    config.num_hidden_layers = 4
    facts = facts_of(config, length=LENGTH, precision=PrecisionConfig(), lora=lora, packed=False)
    experts = facts.moe[0].experts
    assert experts is not None
    layout = resolve_layout(parallel, 64, experts.spec.num_experts)
    found = simulate(config, parallel, 64, length=LENGTH, mode=mode, lora=lora, choice=experts.choice)
    assert found.peak == pytest.approx(memory_of(facts, layout, Batch(1, 1), mode).total, rel=0.05)
    for transfer in traffic_of(facts, layout, Batch(1, 1), mode):
        calls, size = found.sent[transfer.axis, transfer.kind]
        assert calls == transfer.calls
        assert size == pytest.approx(transfer.bytes, rel=0.02)
    assert found.process_groups <= 8  # the world, and one for each axis, however many ranks there are


def test_what_fake_tensors_cannot_do_is_refused() -> None:
    fp32 = PrecisionConfig(params="float32", compute="float32", reduce="float32")
    facts = facts_of(qwen3_30b_a3b(), length=8, precision=fp32, packed=False)
    experts = facts.moe[0].experts
    assert experts is not None
    with pytest.raises(InputError, match="only bfloat16 can be simulated"):
        simulate(qwen3_30b_a3b(), ParallelConfig(ep=8), 64, length=8, precision=fp32, choice=experts.choice)
