"""One rank of 64 on fake tensors holds and sends what the formulas say, by the product's own code."""

from typing import Literal

import pytest
import torch
from torch.distributed.tensor import debug

from benchmarks.planning import SIZES
from benchmarks.shapes import deepseek_v3, qwen3_30b_a3b
from expertmesh.config import LoraConfig, ParallelConfig, PrecisionConfig
from expertmesh.distributed.layout import Layout, resolve_layout
from expertmesh.model import ModelOptions
from expertmesh.parallel.checkpointing import CheckpointingMode
from expertmesh.planning import memory, traffic
from expertmesh.planning.memory import peak_of
from expertmesh.planning.stages import Batch, CheckpointedLayers, InFlight, Workload, resident_state
from expertmesh.planning.traffic import traffic_of
from expertmesh.simulation import planned_by_axis, simulate
from expertmesh.step import by_layer
from expertmesh.step.forward_backward import Order
from tests.support.errors import refused
from tests.support.models import tiny_config
from tests.support.planned import figures_of

LENGTH = 1024
HalfOrFull = Literal["bfloat16", "float32"]


@pytest.mark.slow(why="one of fourteen stays")
@pytest.mark.parametrize(
    ("shape", "parallel", "mode", "lora", "micro_batches", "layers", "stage"),
    [
        ("qwen", ParallelConfig(ep=8), "full", None, 1, "all", 0),
        ("qwen", ParallelConfig(ep=8, replicate=2), "none", LoraConfig(), 1, "all", 0),
        ("qwen", ParallelConfig(ep=8, tp=2, cp=2), "selective", None, 2, "all", 0),
        ("qwen", ParallelConfig(ep=8, tp=2), "none", LoraConfig(), 1, "all", 0),
        ("qwen", ParallelConfig(ep=8, tp=2), "full", LoraConfig(), 1, "all", 0),
        ("qwen", ParallelConfig(ep=4, pp=2, tp=2), "full", None, 4, 2, 0),
        ("qwen", ParallelConfig(ep=4, pp=4), "none", None, 2, "all", 3),
        ("qwen", ParallelConfig(ep=4, pp=4), "full", None, 8, "all", 2),
        ("qwen", ParallelConfig(ep=4, pp=2, pp_virtual_stages=2), "none", None, 4, "all", 1),
        ("deepseek", ParallelConfig(ep=16, tp=4), "selective", None, 1, "all", 0),
        ("deepseek", ParallelConfig(ep=16, cp=4), "none", None, 1, "all", 0),
        ("deepseek", ParallelConfig(ep=8, pp=4), "full", None, 4, "all", 0),
    ],
)
def test_simulated_rank_of_64_is_what_the_formulas_say(
    shape: str,
    parallel: ParallelConfig,
    mode: CheckpointingMode,
    lora: LoraConfig | None,
    micro_batches: int,
    layers: CheckpointedLayers,
    stage: int,
) -> None:
    _check(shape, parallel, mode, lora, Batch(1, micro_batches), layers, stage)


def _check(
    shape: str,
    parallel: ParallelConfig,
    mode: CheckpointingMode,
    lora: LoraConfig | None,
    batch: Batch,
    layers: CheckpointedLayers,
    stage: int,
) -> None:
    config = qwen3_30b_a3b() if shape == "qwen" else deepseek_v3()
    # By layer each block runs alone: the first, one between, and the last, which stays gathered. The first three of
    # DeepSeek-V3 have no experts.
    fewest = 6 if batch.order.inputs_on_host else 3 if batch.order.by_layer and shape == "qwen" else 4
    config.num_hidden_layers = max(fewest, parallel.pp * parallel.pp_virtual_stages)
    model = figures_of(config, length=LENGTH, precision=PrecisionConfig(), lora=lora, packed=False)
    layout = resolve_layout(parallel, 64, model.anatomy.num_experts)
    workload = Workload(model, layout, batch, mode, layers)
    found = simulate(config, workload, ModelOptions(PrecisionConfig(), lora), stage=stage)
    state = resident_state(model, layout, stage)
    assert found.state == pytest.approx(state.frozen + state.master + state.moments, rel=0.001)
    assert found.peak == pytest.approx(peak_of(workload, stage), rel=0.05)
    planned = planned_by_axis(traffic_of(workload, stage), found.sent)
    for key, sent in found.sent.items():
        if sent.bytes > 1024:
            assert sent.calls == planned[key].calls, key
            assert sent.bytes == pytest.approx(planned[key].bytes, rel=0.01), key
    assert set(planned) <= {key for key, sent in found.sent.items() if sent.bytes}
    # The world, one for each axis of four views, and pairs of neighbours along pp, however many ranks there are.
    assert found.process_groups <= 16


@pytest.mark.parametrize(
    ("family", "layout", "mode", "params", "reduce"),
    [
        ("qwen3_moe", Layout(replicate=2, fsdp=2, ep=2), "full", "bfloat16", "float32"),  # what is reduced is wider
        ("qwen3_moe", Layout(replicate=2, fsdp=2, ep=2), "full", "float32", "bfloat16"),  # or narrower
        ("deepseek_v3", Layout(pp=2, fsdp=2, ep=2), "selective", "float32", "float32"),  # shared experts again
    ],
)
def test_no_peak_is_above_what_is_planned(
    family: str, layout: Layout, mode: CheckpointingMode, params: HalfOrFull, reduce: HalfOrFull
) -> None:
    precision = PrecisionConfig(params=params, compute="bfloat16", reduce=reduce)
    sizes = {"hidden_size": 128, "vocab_size": 512, "num_hidden_layers": 4, "num_experts_per_tok": 4}
    config = tiny_config(family, max_position_embeddings=256, **sizes, **SIZES[family])
    model = figures_of(config, length=256, precision=precision, packed=False)
    workload, stage = Workload(model, layout, Batch(2, layout.pp**2), mode), layout.pp - 1
    assert -0.01 <= peak_of(workload, stage) / simulate(config, workload, stage=stage).peak - 1 <= 0.06


@pytest.mark.slow_cases(r"(?!olmoe).*", why="a norm over all heads stays")
@pytest.mark.parametrize(
    ("family", "tied", "layout"),
    [
        ("qwen3_moe", False, Layout(fsdp=2)),  # whose norm is one number, which no formula has
        ("olmoe", False, Layout(fsdp=2, tp=2, ep=2)),
        ("qwen3_moe", True, Layout(pp=2, fsdp=2, ep=2)),
        ("qwen3_moe", True, Layout(pp=2, fsdp=2, ep=2, pp_schedule="interleaved_1f1b", pp_virtual_stages=2)),
    ],
)
def test_norms_over_all_heads_and_tied_heads_are_sent_as_planned(family: str, tied: bool, layout: Layout) -> None:
    config = tiny_config(family, num_hidden_layers=4, tie_word_embeddings=tied, vocab_size=512)
    model = figures_of(config, length=64, precision=PrecisionConfig(), packed=False)
    workload = Workload(model, layout, Batch(1, 4), "none")
    for stage in range(layout.pp):
        sent = {key: each for key, each in simulate(config, workload, stage=stage).sent.items() if each.bytes}
        planned = planned_by_axis(traffic_of(workload, stage), sent)
        assert {key: each.calls for key, each in planned.items()} == {key: each.calls for key, each in sent.items()}
        for key, each in sent.items():
            assert each.bytes == pytest.approx(planned[key].bytes, rel=0.02), key


def test_no_offset_of_a_simulated_rank_is_left_behind() -> None:
    """A rank that is forked behind it, or simulated after it, has other offsets in an equal mesh."""
    config = tiny_config("qwen3_moe", num_hidden_layers=1)
    model = figures_of(config, length=64, precision=PrecisionConfig(), packed=False)
    simulate(config, Workload(model, Layout(fsdp=2, ep=2), Batch(1, 1), "none"))
    assert debug._get_python_sharding_prop_cache_info().currsize == 0
    assert debug._get_fast_path_sharding_prop_cache_stats() == (0, 0)


@pytest.mark.slow_cases(r"(?!qwen-parallel0).*", why="one of seven stays")
@pytest.mark.parametrize(
    ("shape", "parallel", "mode", "lora", "rows", "size", "layers"),
    [
        ("qwen", ParallelConfig(ep=8), "full", LoraConfig(), 1, None, "all"),
        ("qwen", ParallelConfig(ep=8), "none", None, 1, None, "all"),
        ("qwen", ParallelConfig(ep=8, tp=2, replicate=2), "full", None, 2, 2, "all"),
        ("qwen", ParallelConfig(ep=8, cp=2), "full", LoraConfig(), 1, 3, 2),
        ("qwen", ParallelConfig(ep=64), "full", None, 1, None, "all"),
        ("qwen", ParallelConfig(ep=8, tp=4), "full", None, 2, None, "all"),
        ("deepseek", ParallelConfig(ep=16), "full", None, 1, 2, "all"),
    ],
)
def test_simulated_rank_that_goes_by_layer_is_what_the_formulas_say(
    shape: str,
    parallel: ParallelConfig,
    mode: CheckpointingMode,
    lora: LoraConfig | None,
    rows: int,
    size: int | None,
    layers: CheckpointedLayers,
) -> None:
    order = Order(by_layer=True, round=size)
    _check(shape, parallel, mode, lora, Batch(rows, 2 if size is None else 4, order), layers, 0)


class _HostInput(by_layer.HostInput):
    """One without its copy, which here would count as memory of the device."""

    def __init__(self, received: torch.Tensor) -> None:
        self._storage, self._stream, self._is_back = received.untyped_storage(), None, None
        self._size = self._storage.nbytes()

    def fetch(self) -> None:
        if self._storage.nbytes() == 0:
            self._storage.resize_(self._size)


@pytest.mark.slow(why="inputs on the device stay")
def test_simulated_rank_with_inputs_on_the_host_is_what_the_formulas_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_layer, "HostInput", _HostInput)
    order = Order(by_layer=True, inputs_on_host=True)
    _check("qwen", ParallelConfig(ep=8, cp=2), "full", LoraConfig(), Batch(4, 6, order), "all", 0)


@pytest.mark.slow(why="with the one above")
def test_inputs_on_the_host_that_were_forgotten_would_be_noticed() -> None:
    order = Order(by_layer=True, inputs_on_host=True)  # here the copies count
    with pytest.raises(AssertionError):
        _check("qwen", ParallelConfig(ep=8, cp=2), "full", LoraConfig(), Batch(4, 6, order), "all", 0)


def test_a_last_layer_that_were_gathered_twice_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "stays_gathered", lambda *_: ())
    with pytest.raises(AssertionError):
        _check("qwen", ParallelConfig(ep=8), "full", LoraConfig(), Batch(1, 2, Order(by_layer=True)), "all", 0)


def test_a_second_micro_batch_in_flight_that_is_forgotten_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "in_flight", lambda *_: (InFlight(0, (1,), (True,)),))
    with pytest.raises(AssertionError):
        _check("qwen", ParallelConfig(ep=4, pp=4), "none", None, Batch(1, 4), "all", 0)


def test_a_prefetch_in_vain_that_is_forgotten_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "prefetches_in_vain", lambda *_: {})
    with pytest.raises(AssertionError):
        _check("qwen", ParallelConfig(ep=4, pp=2, pp_virtual_stages=3), "none", None, Batch(1, 4), "all", 1)


def test_what_fake_tensors_cannot_do_is_refused() -> None:
    fp32 = PrecisionConfig(params="float32", compute="float32", reduce="float32")
    model = figures_of(qwen3_30b_a3b(), length=8, precision=fp32, packed=False)
    with refused("simulation.only-bfloat16"):
        simulate(qwen3_30b_a3b(), Workload(model, Layout(fsdp=64, ep=8), Batch(1, 1), "full"))
