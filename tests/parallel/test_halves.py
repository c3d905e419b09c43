"""`moe.interleave`: a block runs on two halves of its rows in one call, and computes what it does on all of them.

Every proof runs with late all-to-alls: what is received is NaN until it is waited for, and what is sent is taken then.
So values or gradients that are read, or changed, while they travel are seen, which gloo would mostly hide. What is
counted and the order of events are exact.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import expertmesh as em
from expertmesh.compat import TorchDispatchMode
from expertmesh.distributed import collectives
from expertmesh.distributed.layout import resolve_layout
from expertmesh.experts import dispatch, expert_mlp
from expertmesh.model import plan_model
from expertmesh.parallel.halves import blocks, travel
from expertmesh.parallel.shard_plan import ShardOptions
from tests.adapters.reference import TARGETS, random_adapter, tiny_peft_run, train_adapters, trainables, worst
from tests.adapters.reference import take_steps as take_adapter_steps
from tests.families.tiny import random_model
from tests.parallel.test_router_loss import AUX, Z, _prove, expected
from tests.support.errors import refused, refused_on_ranks
from tests.support.models import tiny_model
from tests.support.ranks import run_ranks
from tests.support.reference import _rows, padded, reference, train_sharded

MOE = em.MoeConfig(interleave=True)
MODES = ("none", "selective", "full")
HIDDEN, LAYERS = 32, 2
TOLERANCE = 1e-5


class _Late:
    """An all-to-all that happens when it is waited for."""

    def __init__(self, exchange: Callable[[], None]) -> None:
        self.exchange: Callable[[], None] | None = exchange

    def wait(self) -> None:
        if self.exchange is not None:
            self.exchange()
        self.exchange = None


def _late(rows: torch.Tensor, send: Any, receive: Any, group: Any, *, wait: bool = True) -> Any:
    if wait:
        return collectives.all_to_all(rows, send, receive, group)
    received = rows.new_full((sum(receive), *rows.shape[1:]), float("nan") if rows.is_floating_point() else -1)

    def exchange() -> None:
        received.copy_(collectives.all_to_all(rows, send, receive, group)[0])

    return received, _Late(exchange)


@contextmanager
def _traffic(all_to_all: Callable[..., Any] = _late) -> Iterator[None]:
    with ExitStack() as stack:
        for module in (dispatch, travel):
            stack.enter_context(mock.patch.object(module, "all_to_all", all_to_all))
        yield


def _check(family: str, parallel: dict[str, int], world: int, micro_batch: int, dtype: Any, **options: Any) -> None:
    want = reference(family, dtype)

    def trained() -> Any:
        with _traffic():
            return train_sharded(want, em.ParallelConfig(**parallel), micro_batch, moe=MOE, **options)

    for distance in run_ranks(trained, world):
        distance.check(TOLERANCE if dtype == torch.float32 else 1e-10)


# Of four ranks each has two of a step's rows, or with cp, tp and replicas more; of two ranks four: three and a single.
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("family", "parallel", "world", "micro_batch"),
    [
        ("qwen3_moe", {"ep": 4}, 4, 2),
        ("qwen3_moe", {"ep": 2}, 4, 2),
        ("qwen3_moe", {"ep": 2}, 2, 3),
        ("deepseek_v3", {"ep": 2}, 4, 2),
        ("gpt_oss", {"ep": 4}, 4, 2),
    ],
)
def test_every_gradient_and_the_weights_after_two_steps_equal_the_unsharded_model(
    family: str, parallel: dict[str, int], world: int, micro_batch: int, mode: str
) -> None:
    _check(family, parallel, world, micro_batch, torch.float32, activation_checkpointing=mode)


@pytest.mark.parametrize(
    ("parallel", "mode"),
    [
        ({"ep": 2, "cp": 2}, "full"),
        ({"ep": 4, "tp": 2}, "none"),
        ({"ep": 2, "tp": 2}, "full"),
        ({"ep": 2, "replicate": 2}, "selective"),
    ],
    ids=["cp", "tp", "tp-full", "replicate"],
)
def test_so_they_do_on_the_other_axes(parallel: dict[str, int], mode: str) -> None:
    _check("qwen3_moe", parallel, 4, 2, torch.float32, activation_checkpointing=mode)


def test_in_double_precision_nothing_is_left_but_the_last_digits() -> None:
    _check("qwen3_moe", {"ep": 2}, 4, 2, torch.float64)


def _swap(own: Callable[..., Any], calls: Any, rows: Any, shape: Any) -> Any:
    """The planted bug: the halves' tokens in the wrong order."""
    return own(calls, rows, shape).flip(0)


def _forget_to_wait(own: Callable[..., Any], work: Any) -> None:
    return None


def _send_twice(own: Callable[..., Any], ctx: Any, gradient: torch.Tensor) -> Any:
    own(ctx, gradient)
    return own(ctx, gradient * 2)


@pytest.mark.parametrize(
    ("where", "name", "bug"),
    [
        (blocks, "result_of", _swap),
        (travel, "wait", _forget_to_wait),
        (dispatch, "wait", _forget_to_wait),
        (travel._SumArrived, "backward", _send_twice),
    ],
    ids=["halves swapped", "results not awaited", "rows not awaited", "gradients sent twice"],
)
def test_a_planted_bug_turns_the_comparison_red(where: Any, name: str, bug: Callable[..., Any]) -> None:
    own = getattr(where, name)

    def planted(*args: Any) -> Any:
        return bug(own, *args)

    with (
        pytest.raises(AssertionError),
        mock.patch.object(where, name, staticmethod(planted) if isinstance(where, type) else planted),
    ):
        _check("qwen3_moe", {"ep": 2}, 2, 2, torch.float32)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapter")
    random_adapter(tiny_model("deepseek_v3"), directory, *TARGETS["deepseek_v3"])
    return directory


@pytest.mark.parametrize("mode", MODES)
def test_adapters_drop_what_they_drop_in_one_process(adapter: Path, mode: str) -> None:
    def trained(ep: int, micro_batch: int, **options: Any) -> dict[str, torch.Tensor]:
        model: Any = tiny_model("deepseek_v3")
        mesh = em.init_mesh(em.ParallelConfig(ep=ep))
        em.parallelize(model, mesh, lora=em.LoraConfig(from_adapter=str(adapter), dropout=0.3), **options)
        with _traffic():
            take_adapter_steps(model, mesh, [_rows(step, ()) for step in range(2)], micro_batch)
        return trainables(model)

    (alone,) = run_ranks(trained, 1, 1, 1)
    # Of four rows three and a single one.
    for own in run_ranks(lambda: trained(2, 3, moe=MOE, activation_checkpointing=mode), 2):
        assert worst(own, alone)[0] <= TOLERANCE


def test_adapters_are_stock_pefts(tmp_path: Path) -> None:
    run = tiny_peft_run("qwen3_moe", tmp_path)
    for distance in run_ranks(lambda: train_adapters(run, em.ParallelConfig(ep=2), 2, moe=MOE), 4):
        distance.check(TOLERANCE)


@pytest.mark.parametrize("layout", [(2, 2, 1, 8), (4, 4, 1, 2)])
def test_router_losses_and_loads_are_those_of_whole_micro_batches(layout: tuple[int, int, int, int]) -> None:
    moe = em.MoeConfig(interleave=True, aux_loss_coef=AUX, z_loss_coef=Z)
    _prove(expected("qwen3_moe"), layout, moe=moe, activation_checkpointing="full")


def _gradients(family: str, moe: em.MoeConfig | None, mode: Any, packed: bool) -> dict[str, torch.Tensor]:
    """Of three rows, other ones on each rank; this rank's shards."""
    mesh, kind = em.init_mesh(em.ParallelConfig(ep=dist.get_world_size())), FAMILIES[family]
    model = em.parallelize(random_model(kind, family).train(), mesh, moe=moe, activation_checkpointing=mode)
    torch.manual_seed(dist.get_rank())
    tokens = torch.randint(2, 96, (3, 12))
    batch = {"input_ids": tokens, "labels": tokens}
    if packed:
        starts = [torch.cat([torch.arange(second), torch.arange(12 - second)]) for second in (5, 8, 3)]
        batch["position_ids"] = torch.stack(starts)
    with _traffic():
        em.causal_lm_loss(model, batch, target_tokens=50).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: (g.to_local() if isinstance(g, DTensor) else g).clone() for name, g in found.items()}


# Shared experts behind a gate, and without; state along the sequence.
FAMILIES = {
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("mode", "packed"), [("full", False), ("none", True)], ids=["full", "packed"])
def test_uneven_halves_and_packed_samples_give_what_whole_micro_batches_do(
    family: str, mode: str, packed: bool
) -> None:
    def both() -> tuple[float, str]:
        whole, halves = (_gradients(family, moe, mode, packed) for moe in (None, MOE))
        return worst(halves, whole)

    for error, name in run_ranks(both, 2):
        assert error <= TOLERANCE, name


def _order(mode: Any) -> list[str]:
    """What is launched, waited for and computed in a step of the last block, in the order of the host."""
    events: list[str] = []

    def all_to_all(rows: torch.Tensor, *args: Any, wait: bool = True) -> Any:
        if rows.is_floating_point() and rows.shape[1:] == (HIDDEN,):
            events.append("send rows")
        received, work = collectives.all_to_all(rows, *args, wait=wait)
        return received, work and (work, rows.shape[1:] == (HIDDEN,))

    def waits(work: Any) -> None:
        if work is not None:
            work[0].wait()
            events.extend(["wait"] * work[1])

    def product(a: torch.Tensor, b: torch.Tensor, end_L: torch.Tensor) -> torch.Tensor:
        if events[-1] != "mlp":
            events.append("mlp")
        return real_product(a, b, end_L)

    def attention(module: nn.Module, args: Any, out: Any) -> None:
        events.append("attention")
        if out[0].requires_grad:
            out[0].register_hook(lambda gradient: events.append("attention backward"))

    real_product = expert_mlp.grouped_mm
    mesh = em.init_mesh(em.ParallelConfig(ep=dist.get_world_size()))
    model: Any = em.parallelize(
        tiny_model("qwen3_moe", num_hidden_layers=1), mesh, moe=MOE, activation_checkpointing=mode
    )  # type: ignore[arg-type]
    model.model.layers[0].self_attn.register_forward_hook(attention)
    with ExitStack() as stack:
        stack.enter_context(_traffic(all_to_all))
        for module in (dispatch, travel):
            stack.enter_context(mock.patch.object(module, "wait", waits))
        stack.enter_context(mock.patch.object(expert_mlp, "grouped_mm", product))
        loss = em.causal_lm_loss(model, padded(_rows(0, ())[:2]), target_tokens=50)
        events.append("backward")
        loss.backward()
    return events


FORWARD = [
    *("attention", "send rows"),  # of the first half
    *("attention", "send rows"),  # of the second, while the first one's rows travel
    *("wait", "mlp", "send rows"),  # of the first, while the second one's travel
    *("wait", "mlp", "send rows"),  # of the second, while the first one's results travel
    *("wait", "wait"),  # for results
]
BACKWARD = [
    *("send rows", "send rows"),  # gradients of results: of the second half, then of the first
    *("wait", "mlp", "send rows"),  # of the second, while the first one's gradients travel
    *("wait", "mlp", "send rows"),  # of the first, while those of the second one's rows travel
    *("wait", "attention backward"),  # of the second, while those of the first one's rows travel
    *("wait", "attention backward"),
]
# A second run ends with what the second half saves last, in its products: no result travels.
AGAIN = ["attention", "send rows", "attention", "send rows", "wait", "mlp", "wait"]
ATTENTION_AGAIN = ["attention", "attention"]


@pytest.mark.parametrize("mode", MODES)
def test_tokens_travel_while_the_other_half_computes_forward_and_backward(mode: str) -> None:
    # A block is run again when backward first asks for what it has not kept: for a half's experts, or its attention.
    at, again = {"none": (0, []), "full": (3, AGAIN), "selective": (9, ATTENTION_AGAIN)}[mode]
    for events in run_ranks(_order, 2, mode):
        backward = events.index("backward")
        assert events[:backward] == FORWARD
        assert events[backward + 1 :] == [*BACKWARD[:at], *again, *BACKWARD[at:]]


class _Counting(TorchDispatchMode):
    """Collectives by name, and the bytes that all-to-alls of rows send."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.row_bytes = Counter[str](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name.startswith("c10d"):
            self.calls[name.removeprefix("c10d::").rstrip("_")] += 1
        if name.startswith("c10d::alltoall_base"):
            sent = args[1]
            self.row_bytes += sent.nbytes if sent.is_floating_point() and sent.shape[1:] == (HIDDEN,) else 0
        return out


def _collectives(moe: em.MoeConfig | None, mode: Any, ep: int, **options: Any) -> tuple[Counter[str], int]:
    mesh = em.init_mesh(em.ParallelConfig(ep=ep))
    model = em.parallelize(tiny_model("qwen3_moe"), mesh, moe=moe, activation_checkpointing=mode, **options)  # type: ignore[arg-type]
    batch = padded(_rows(0, ())[mesh.data_rank :: mesh.layout.data_ranks][:2])
    for watch in (_Counting(), _Counting()):  # FSDP2 makes what stays in the first step
        with watch:
            em.causal_lm_loss(model, batch, target_tokens=50).backward()
    return watch.calls, watch.row_bytes


@pytest.mark.parametrize("mode", MODES)
def test_fsdp2_gathers_and_reduces_once_and_the_same_rows_travel_in_twice_as_many_messages(mode: str) -> None:
    """With two ranks of efsdp."""

    def both() -> Any:
        return [_collectives(moe, mode, 2) for moe in (None, MOE)]

    for (whole, whole_bytes), (halves, halves_bytes) in run_ranks(both, 4):
        assert halves_bytes == whole_bytes > 0
        all_to_alls = [calls.pop("alltoall_base") for calls in (whole, halves)]
        assert all_to_alls == [LAYERS * 7 + 2 * LAYERS * (mode == "full"), 2 * all_to_alls[0]]
        assert halves == whole
        assert {"allgather_base", "_allgather_base", "_reduce_scatter_base", "reduce_scatter_base"} & whole.keys()


def _in_evaluation(rows: int) -> list[float]:
    """Of a rank with `rows` rows beside one with two; and of what it generates."""
    mesh = em.init_mesh(em.ParallelConfig(ep=2))
    found = []
    for moe in (None, MOE):
        model: Any = em.parallelize(tiny_model("qwen3_moe"), mesh, moe=moe)
        tokens = torch.randint(96, (rows if mesh.rank else 2, 8), generator=torch.Generator().manual_seed(3))
        with torch.no_grad(), _traffic():
            loss = em.causal_lm_loss(model.eval(), {"input_ids": tokens, "labels": tokens}, target_tokens=14)
            made = model.generate(tokens, max_new_tokens=3, min_new_tokens=3, do_sample=False)
        found += [float(loss), *made.flatten().tolist()]
    half = len(found) // 2
    return [abs(a - b) for a, b in zip(found[:half], found[half:], strict=True)]


@pytest.mark.parametrize("rows", [1, 3])
def test_ranks_with_other_numbers_of_rows_and_generation_with_a_cache_join_in(rows: int) -> None:
    for differences in run_ranks(_in_evaluation, 2, rows):
        assert max(differences) <= 1e-5


@pytest.mark.parametrize("at", [2, 4], ids=["forward", "second run"])
def test_an_error_in_the_second_half_reaches_the_caller_and_closes_the_first(at: int) -> None:
    def fails() -> tuple[str, int]:
        mesh = em.init_mesh(em.ParallelConfig(ep=2))
        model: Any = em.parallelize(tiny_model("qwen3_moe"), mesh, moe=MOE, activation_checkpointing="full")
        calls = 0

        def fail(module: nn.Module, args: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == at:
                raise RuntimeError("the second half failed")

        model.model.layers[1].self_attn.register_forward_pre_hook(fail)
        said = ""
        try:
            em.causal_lm_loss(model, padded(_rows(0, ())[:2]), target_tokens=50).backward()
        except RuntimeError as error:
            said = str(error)
        return said, _alive()

    assert run_ranks(fails, 2) == [("the second half failed", 0)] * 2


def _alive() -> int:
    return sum(isinstance(each, blocks._Half | travel.Call) for each in gc.get_objects())


def test_no_tensor_lives_in_a_cycle_after_a_step() -> None:
    """What only Python's collector of cycles would free is memory that a GPU lacks until then."""

    def halves_alive() -> int:
        mesh = em.init_mesh(em.ParallelConfig(ep=2))
        model = em.parallelize(tiny_model("qwen3_moe"), mesh, moe=MOE, activation_checkpointing="full")  # type: ignore[arg-type]
        batch = padded(_rows(0, ())[:2])
        em.causal_lm_loss(model, batch, target_tokens=50).backward()
        gc.collect()
        gc.disable()
        em.causal_lm_loss(model, batch, target_tokens=50).backward()
        return _alive()

    assert run_ranks(halves_alive, 2) == [0, 0]


@pytest.mark.parametrize(
    ("family", "parallel", "options", "naming"),
    [
        ("qwen3_moe", {"ep": 1}, {}, "no token travels"),
        ("qwen3_moe", {"ep": 2}, {"dispatch": "all_gather"}, "all_gather"),
        ("qwen3_moe", {"ep": 2, "pp": 2}, {}, "parallel.pp"),
        ("qwen3_moe", {"ep": 2}, {"compile": True}, "train.compile"),
        ("llama4", {"ep": 2}, {}, "every token for every expert"),
        ("muse_spark", {"ep": 2}, {}, "a norm behind"),
        ("zaya", {"ep": 2}, {}, "zaya cannot be cut"),
        ("glm_moe_dsa", {"ep": 2}, {}, "its blocks return more"),
    ],
)
def test_what_cannot_be_interleaved_is_refused_before_weights_are_read(
    family: str, parallel: dict[str, int], options: dict[str, Any], naming: str
) -> None:
    model = random_model(REFUSED.get(family, "Qwen3MoeForCausalLM"), family)
    layout = resolve_layout(em.ParallelConfig(**parallel), 4, 8)
    precision = em.PrecisionConfig(params="float32", compute="float32", reduce="float32")
    dispatch, compiles = options.get("dispatch", "auto"), options.get("compile", False)
    moe = em.MoeConfig(interleave=True, dispatch=dispatch)
    with refused("moe.interleave-unsupported", naming=naming):
        plan_model(model, layout, ShardOptions(precision, moe, compile=compiles))


REFUSED = {
    "llama4": "Llama4ForCausalLM",
    "muse_spark": "MuseSparkForConditionalGeneration",
    "zaya": "ZayaForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
}


def test_without_greenlet_it_is_refused() -> None:
    precision = em.PrecisionConfig(params="float32", compute="float32", reduce="float32")
    layout = resolve_layout(em.ParallelConfig(ep=2), 2, 8)
    with mock.patch("importlib.util.find_spec", return_value=None), refused("moe.interleave-needs-greenlet"):
        plan_model(tiny_model("qwen3_moe"), layout, ShardOptions(precision, MOE))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "naming"),
    [({"use_cache": False, "cu_seq_lens_q": torch.zeros(3)}, "cu_seq_lens_q"), ({}, "use_cache=False")],
)
def test_an_argument_whose_rows_are_not_known_is_refused_by_name(given: dict[str, Any], naming: str) -> None:
    def call() -> None:
        model: Any = em.parallelize(tiny_model("qwen3_moe"), em.init_mesh(em.ParallelConfig(ep=2)), moe=MOE)
        model(input_ids=torch.zeros(2, 4, dtype=torch.int64), **given)

    with refused_on_ranks("moe.interleave-unsupported", naming=naming):
        run_ranks(call, 2)
