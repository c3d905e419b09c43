"""Dispatch by other libraries' kernels: emulated over gloo, it is the all-to-all's, in results and every gradient.

None of it has run on a GPU. What the emulations do is written from the libraries' sources (tests/support).
"""

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import expertmesh as em
from expertmesh.anatomy import describe
from expertmesh.config import Config
from expertmesh.distributed.layout import Layout
from expertmesh.experts import deepep
from expertmesh.experts.deepep import LibraryDispatcher
from expertmesh.experts.dispatch import AllToAllDispatcher, Dispatcher
from expertmesh.experts.install import close_library
from expertmesh.parallel.refusals import refuse_dispatch
from expertmesh.training.control import Control
from expertmesh.verification.options import LAYERS, VerifyOptions
from expertmesh.verification.run import verify
from tests.adapters.reference import TARGETS, random_adapter, worst
from tests.adapters.test_dropout import BLOCKS, FAMILY, with_dropout
from tests.families.tiny import random_model
from tests.support import fake_deep_ep
from tests.support.errors import refused
from tests.support.models import tiny_model
from tests.support.placements import drawn
from tests.support.ranks import RankFailed, run_ranks, shared_ranks
from tests.support.reference import padded, reference, rows_of_step, train_sharded
from tests.training.tiny_run import run_config, write_inputs

EXPERTS, HIDDEN, TOP_K = 8, 16, 3
TOKENS = [7, 0, 5, 12]
DEEPEP = em.MoeConfig(dispatch="deepep")
Routing = Callable[[int], torch.Tensor]


def _spread(tokens: int) -> torch.Tensor:
    return torch.rand(tokens, EXPERTS).topk(TOP_K).indices


def _to_first_experts(tokens: int) -> torch.Tensor:
    """With 4 ranks of 2 experts, ranks 2 and 3 receive nothing."""
    return torch.arange(TOP_K).expand(tokens, TOP_K)


def _with_none(tokens: int) -> torch.Tensor:
    """Some choices are of no expert."""
    index = _spread(tokens)
    return index.masked_fill(torch.rand(index.shape) < 0.4, EXPERTS)


ROUTINGS = {"spread": _spread, "two ranks without a token": _to_first_experts, "choices of no expert": _with_none}


@contextmanager
def _installed(*dtypes: torch.dtype) -> Iterator[None]:
    """The emulation under the library's name; it also carries rows of `dtypes`."""
    carried = mock.patch.object(fake_deep_ep, "CARRIED", [torch.bfloat16, *dtypes])
    with mock.patch.dict(sys.modules, {"deep_ep": fake_deep_ep}), carried:
        yield


def _dispatchers() -> tuple[LibraryDispatcher, AllToAllDispatcher]:
    group: Any = dist.group.WORLD
    library = deepep.Exchange(group, HIDDEN)
    return LibraryDispatcher(EXPERTS, group.size(), library), AllToAllDispatcher(EXPERTS, group)


def _through(dispatcher: Dispatcher, index: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Expert e multiplies by e + 1; results, gradients, and what the numbers of rows say."""
    rank, tokens = dist.get_rank(), len(index)
    torch.manual_seed(rank)
    hidden = torch.randn(tokens, HIDDEN, dtype=dtype, requires_grad=True)
    weight = torch.rand(tokens, TOP_K, dtype=dtype, requires_grad=True)
    rows, weight_P, pairs, metadata = dispatcher.dispatch(hidden, index, weight)
    scale_P = weight_P * (pairs.expert_P() + rank * EXPERTS // dist.get_world_size() + 1)
    out_PH = rows[pairs.row_P].float() * scale_P.unsqueeze(1).float()
    token_number_R = dispatcher.send_token_numbers(torch.arange(tokens) + (rank << 40) + 1, metadata)
    summed = torch.zeros(len(rows), HIDDEN).index_add(
        0, pairs.row_P, out_PH * (token_number_R % 7).float()[pairs.row_P, None]
    )
    out = dispatcher.combine(summed.to(dtype), metadata)
    weighting = torch.arange(out.numel(), dtype=torch.float32).view_as(out) / 10
    gradients = torch.autograd.grad((out.float() * weighting).sum(), [hidden, weight])
    ends = pairs.expert_end_L.to(torch.float32), token_number_R.sort().values.double()
    return [out.detach(), *gradients, *ends]


def _compared(routing: Routing, dtype: torch.dtype) -> tuple[float, list[str]]:
    torch.manual_seed(dist.get_rank())
    index = routing(TOKENS[dist.get_rank()])
    own, plain = _dispatchers()
    got, expected = (_through(dispatcher, index, dtype) for dispatcher in (own, plain))
    assert [each.shape for each in got] == [each.shape for each in expected]
    assert all(each.isfinite().all() for each in got)
    errors = [float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in zip(got, expected, strict=True)]
    return max(errors), fake_deep_ep.OPENED[0].calls


@pytest.mark.slow_cases(
    r"(spread-.*|two ranks without a token-torch\.bfloat16|choices of no expert-torch\.float32)",
    why="pairwise over routings and dtypes",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_results_and_gradients_equal_the_all_to_alls(routing: str, dtype: torch.dtype) -> None:
    with _installed(dtype):
        for error, calls in run_ranks(_compared, 4, ROUTINGS[routing], dtype):
            assert error <= (1e-6 if dtype == torch.float32 else 2**-7)
            # Counts, rows and weights in one; the numbers; the way back; in backward its reverse, then the first's.
            assert calls == ["open", "dispatch", "cached dispatch", "combine", "cached dispatch", "combine"]


@contextmanager
def _taken() -> Iterator[None]:
    """On ranks without a GPU, in fp32."""
    with _installed(torch.float32), mock.patch("expertmesh.experts.deepep.refusal", return_value=None):
        yield


@pytest.mark.slow_cases(r"qwen3_moe-.*", why="recomputed blocks with shared experts stay")
@pytest.mark.slow_cases(r"deepseek_v3-layout2-selective", why="full weights stay")
@pytest.mark.parametrize(
    ("family", "layout", "mode"),
    [
        ("qwen3_moe", (4, 4), "none"),
        ("deepseek_v3", (4, 2), "full"),
        ("deepseek_v3", (4, 4), "selective"),
    ],
)
def test_the_sharded_model_equals_the_unsharded(family: str, layout: tuple[int, int], mode: str) -> None:
    expected, (world, ep) = reference(family), layout
    options: dict[str, Any] = {"moe": DEEPEP, "activation_checkpointing": mode}
    with _taken():
        for distance in run_ranks(lambda: train_sharded(expected, em.ParallelConfig(ep=ep), **options), world):
            distance.check(1e-5)


def test_rows_go_to_experts_wherever_they_are_placed(tmp_path: Path) -> None:
    expected = reference("qwen3_moe")
    moe = drawn(tmp_path / "placement.json", expected.model, 4).model_copy(update={"dispatch": "deepep"})
    with _taken():
        for distance in run_ranks(lambda: train_sharded(expected, em.ParallelConfig(ep=4), moe=moe), 4):
            distance.check(1e-5)


def _drop_weights_on_the_way_back(model: Any, mesh: Any) -> None:
    back = deepep.Exchange.combine

    def without(library: Any, rows: torch.Tensor, handle: Any, weight: torch.Tensor | None = None) -> Any:
        return back(library, rows, handle, None if weight is None else torch.zeros_like(weight))

    mock.patch.object(deepep.Exchange, "combine", without).start()


def _take_the_handle_of_another_layer(model: Any, mesh: Any) -> None:
    first, seen = deepep.Exchange.dispatch, []

    def with_another(*args: Any) -> Any:
        seen.append(first(*args))
        return replace(seen[-1], handle=seen[max(0, len(seen) - 2)].handle)

    mock.patch.object(deepep.Exchange, "dispatch", with_another).start()


@pytest.mark.parametrize("bug", [_drop_weights_on_the_way_back, _take_the_handle_of_another_layer])
def test_a_planted_bug_turns_the_comparison_red(bug: Callable[[Any, Any], None]) -> None:
    expected = reference("qwen3_moe")

    def check() -> None:
        train_sharded(expected, em.ParallelConfig(ep=2), moe=DEEPEP, tamper=bug).check(1e-5)

    with _taken(), pytest.raises(RankFailed):
        run_ranks(check, 2)


MODES = ("none", "selective", "full")


def _in_every_mode(model_class: str, family: str) -> tuple[list[str], float, list[dict[str, int]], list[bool]]:
    """Which gradients are not bit for bit those without checkpointing, how far these are from the all-to-all's, and
    the library's calls.
    """
    mesh, initial, found, calls = em.init_mesh(em.ParallelConfig(ep=2)), random_model(model_class, family), {}, []
    alive = []
    for mode in ("all_to_all", *MODES):
        moe = em.MoeConfig(dispatch="all_to_all") if mode == "all_to_all" else DEEPEP
        ways: Any = {"moe": moe, "activation_checkpointing": "none" if mode == "all_to_all" else mode}
        model = em.parallelize(copy.deepcopy(initial).train(), mesh, **ways)
        loss = em.causal_lm_loss(model, padded(rows_of_step(0, ())[mesh.rank :: 2]), target_tokens=64)
        loss.backward()
        found[mode] = {each: p.grad.full_tensor() for each, p in model.named_parameters() if p.grad is not None}
        if mode != "all_to_all":
            (opened,) = fake_deep_ep.OPENED  # one for all layers
            calls.append(dict(Counter(opened.calls)))
            close_library(model)
            alive.append(opened.alive)
            fake_deep_ep.OPENED.clear()
    plain = found["none"]
    changed = [f"{mode} {each}" for mode in MODES[1:] for each in plain if not found[mode][each].equal(plain[each])]
    return changed, worst(plain, found["all_to_all"])[0], calls, alive


@pytest.mark.slow_cases(r"qwen3_moe-.*", why="llama4 stays, which has a second exchange in backward")
@pytest.mark.parametrize(
    ("family", "model_class", "layers", "again"),
    [("qwen3_moe", "Qwen3MoeForCausalLM", 2, 0), ("llama4", "Llama4ForCausalLM", 4, 4)],
)
def test_recomputation_changes_no_bit_and_exchanges_no_counts(
    family: str, model_class: str, layers: int, again: int
) -> None:
    with _taken():
        for changed, distance, calls, alive in run_ranks(_in_every_mode, 2, model_class, family):
            assert changed == []
            assert distance <= 1e-5
            # The host waits in "dispatch" alone. In backward a layer dispatches results' gradients and combines rows'.
            once = {"open": 1, "dispatch": layers, "cached dispatch": layers, "combine": 2 * layers}
            assert calls == [once, once, once | {"cached dispatch": 2 * layers, "combine": 2 * layers + again}]
            assert alive == [False] * 3


@pytest.mark.slow(why="adapters/test_dropout.py stays")
def test_dropout_of_adapters_drops_the_same(tmp_path: Path) -> None:
    random_adapter(tiny_model(FAMILY, **BLOCKS), tmp_path, *TARGETS[FAMILY])
    (alone,) = shared_ranks(with_dropout, 1, tmp_path, 1)
    moe = DEEPEP
    with _taken():
        for mode in ("none", "full"):
            trained = run_ranks(lambda mode=mode: with_dropout(tmp_path, 4, moe=moe, activation_checkpointing=mode), 4)
            assert worst(trained[0], alone)[0] <= 1e-5


@pytest.mark.slow(why="verification/test_layers.py has jobs in bf16")
def test_a_job_whose_rows_a_library_carries_is_verified(tmp_path: Path) -> None:
    """In its own precision alone, by buffers that are freed; what is compared in fp32 has the all-to-all."""
    overrides = ("precision.compute=bfloat16", "parallel.ep=2", "moe.dispatch=deepep")
    config = run_config(write_inputs(tmp_path / "inputs", "qwen3_moe"), tmp_path / "run", *overrides)

    def verified() -> tuple[str, Any, list[bool], int]:
        options = VerifyOptions(tokens=256, only=LAYERS[:-1])
        report: Any = verify(config, Control(arguments=options.dump()))
        calls = sum(len(each.calls) for each in fake_deep_ep.OPENED)
        return report.status, report.failures, [each.alive for each in fake_deep_ep.OPENED], calls

    with _installed(), mock.patch("expertmesh.experts.deepep.refusal", return_value=None):
        for status, failures, alive, calls in run_ranks(verified, 2):
            assert status == "pass", failures
            assert alive == [False] * 3
            assert calls > 50


def _asked(ep: int = 2, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> None:
    anatomy = describe(tiny_model("qwen3_moe", **changes))
    refuse_dispatch(DEEPEP, Layout(fsdp=ep, ep=ep), anatomy, dtype)


@contextmanager
def _on_gpus(backend: str | None = "nccl") -> Iterator[None]:
    """As a rank with a GPU sees it, or (None) a launcher."""
    started = mock.patch.multiple(
        "torch.distributed", is_initialized=lambda: backend is not None, get_backend=lambda: backend
    )
    with started, mock.patch("expertmesh.experts.deepep.has_gpu", return_value=True):
        yield


KEY = "moe.dispatch-unsupported"


def test_a_library_that_cannot_be_used_is_refused_by_name() -> None:
    with refused(KEY, naming="there is no GPU"):
        _asked()
    with refused(KEY, naming="precision.compute is float32"):
        _asked(dtype=torch.float32)
    for backend in ("nccl", None):
        with _on_gpus(backend), refused(KEY, naming="deep_ep is not installed"):
            _asked()
    with _on_gpus("fake"), _installed(), refused(KEY, naming="cannot be simulated"):
        _asked()
    # A launcher does not import it, a rank does.
    with mock.patch.dict(sys.modules, {"deep_ep": mock.Mock(__spec__=mock.Mock(), spec=[])}):
        with _on_gpus(None):
            _asked()
        with _on_gpus(), refused(KEY, naming="deep_ep.Buffer cannot be imported (AttributeError"):
            _asked()
    with _on_gpus(), _installed():
        _asked()


@pytest.mark.parametrize(
    ("ep", "node", "changes", "naming"),
    [
        (1, 8, {}, "has kernels for ep 2, 4"),
        (4, 2, {}, "the 4 ranks of an EP group have to be one node"),
        (16, 4, {"num_experts": 16}, "have to be 2 whole nodes of 8 ranks"),
        (16, 8, {"num_experts": 16}, "a multiple of 256 values"),
        (2, 8, {"hidden_size": 40}, "a multiple of 16 values"),
        (2, 8, {"num_experts": 258}, "at ep 2 it takes 128 experts a rank"),
    ],
)
def test_what_deepep_has_no_kernels_for_is_refused(
    ep: int, node: int, changes: dict[str, Any], naming: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(node))
    with refused(KEY, naming=naming):
        _asked(ep, **changes)


def test_a_deepep_without_what_is_given_to_it_is_refused() -> None:
    """1.1.0 does not know `explicitly_destroy`."""

    def older(self: Any, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        pass

    older_one = mock.patch.object(fake_deep_ep.Buffer, "__init__", older)
    with _on_gpus(), _installed(), older_one, refused(KEY, naming="another Buffer.__init__"):
        _asked()


@pytest.mark.parametrize("ep", deepep.RANKS)
@pytest.mark.parametrize("hidden", [2048, 7168])
def test_the_plan_counts_deepeps_buffers(ep: int, hidden: int) -> None:
    buffer = fake_deep_ep.Buffer
    configs = [buffer.get_dispatch_config(ep), buffer.get_combine_config(ep)]
    held = max(config.get_nvl_buffer_size_hint(2 * hidden, ep) for config in configs) + (32 << 20)
    if ep > 8:
        far = max(config.get_rdma_buffer_size_hint(2 * hidden, ep) for config in configs)
        held += -(-far // (1 << 29)) << 29
    assert deepep.buffer_bytes(Layout(fsdp=ep, ep=ep), hidden) == pytest.approx(held, rel=0.01)


def test_torchs_deterministic_algorithms_are_refused_with_a_library() -> None:
    sections: dict[str, Any] = {"model": {"name_or_path": "m"}, "data": {"train": "d"}, "output_dir": "o"}
    with pytest.raises(ValueError, match=r"train\.deterministic is true, but moe\.dispatch is deepep"):
        Config.model_validate(sections | {"train": {"deterministic": True}, "moe": {"dispatch": "deepep"}})
