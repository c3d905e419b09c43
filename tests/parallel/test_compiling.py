"""Compiled dense parts give the eager gradients, keep every name, and are refused by name where they cannot.

One test compiles for real (tens of seconds); the others trace with torch's own "aot_eager", which is the same graph
without generated code.
"""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.distributed.tensor import DTensor

import expertmesh as em
from expertmesh.anatomy import describe
from expertmesh.config.errors import InputError
from expertmesh.parallel import compiling
from expertmesh.parallel.compiling import compile_parts, compiled_parts, refuse_compile
from tests.families.tiny import random_model
from tests.support.errors import refused
from tests.support.models import tiny_model
from tests.support.ranks import run_ranks
from tests.support.reference import padded, rows_of_step

TOLERANCE = 1e-5
TRACED = partial(torch.compile, backend="aot_eager")


@pytest.fixture(scope="module", autouse=True)
def _traced_before() -> None:
    """Trace something here once, of lengths that change: ranks inherit what that loads and tabulates."""
    part = nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 4), nn.SiLU())
    traced = TRACED(part.forward, fullgraph=True)
    for length in (3, 5):
        traced(torch.ones(2, length, 4, requires_grad=True)).sum().backward()
    torch._dynamo.reset()


def _step(model: nn.Module, mesh: Any, lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Whole gradients summed over micro-batches of these lengths, other rows on every data rank."""
    model.zero_grad()
    for length in lengths:
        rows = [(ids.repeat(4)[:length], ids.repeat(4)[:length]) for ids, _ in rows_of_step(mesh.data_rank, ())[:2]]
        em.causal_lm_loss(model, padded(rows), target_tokens=200, chunk_tokens=16).backward()
    whole = {n: p.grad.full_tensor() for n, p in model.named_parameters() if isinstance(p.grad, DTensor)}
    assert whole
    return whole


def _worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[n] - g).norm() / g.norm().clamp_min(1e-12)) for n, g in expected.items())


def _graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _compare(
    family: str, ep: int, modes: tuple[str, ...], layers: int = 2, **options: Any
) -> list[tuple[float, list[int]]]:
    """For each mode, the distance from eager, and how many graphs there were after each further set of lengths."""
    mesh, initial, found = em.init_mesh(em.ParallelConfig(ep=ep)), tiny_model(family, num_hidden_layers=layers), []
    eager = em.parallelize(copy.deepcopy(initial), mesh, **options)  # type: ignore[arg-type]
    names = list(eager.state_dict())
    expected = _step(eager, mesh, (9, 14))
    for mode in modes:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = copy.deepcopy(initial)
        em.parallelize(compiled, mesh, activation_checkpointing=mode, compile=True, **options)  # type: ignore[arg-type]
        assert list(compiled.state_dict()) == names
        distance, graphs = _worst(_step(compiled, mesh, (9, 14)), expected), [_graphs()]
        for lengths in ((30, 11),):
            _step(compiled, mesh, lengths)
            graphs.append(_graphs())
        compiled.eval()
        with torch.no_grad():
            compiled(input_ids=torch.arange(6)[None])
        graphs.append(_graphs())
        found.append((distance, graphs))
    return found


def _check(found: list[tuple[float, list[int]]]) -> None:
    for distance, graphs in found:
        assert distance <= TOLERANCE
        assert 3 <= graphs[0] <= 12  # attention, norm, two MLPs: for the first length, for all others, for no mask
        assert len(set(graphs)) == 1, "a length or an evaluation has compiled again"


@pytest.mark.slow(why="generates and compiles C++; the same graphs are traced by the test beside it")
def test_compiled_code_gives_the_eager_gradients_for_any_length() -> None:
    for found in run_ranks(lambda: _compare("qwen3_moe", 2, ("selective",), layers=1), 2):
        _check(found)


@pytest.mark.slow(why="each compiles for ten seconds; full weights of one row a micro-batch stay")
@pytest.mark.parametrize(
    ("family", "mode", "options"),
    [("deepseek_v3", "full", {}), ("qwen3_moe", "selective", {"layers": 1, "lora": em.LoraConfig(r=8)})],
    ids=["shared experts and dense MLPs", "adapters"],
)
def test_all_parts_trace_to_graphs_that_are_equal_too(family: str, mode: str, options: dict[str, Any]) -> None:
    with mock.patch.object(torch, "compile", TRACED), mock.patch.object(compiling, "_probe"):
        _check(run_ranks(lambda: _compare(family, 1, (mode,), **options), 1)[0])


def _gradients(
    initial: nn.Module, parallel: em.ParallelConfig, mode: str, compile: bool, rows: int, lora: em.LoraConfig | None
) -> dict[str, torch.Tensor]:
    """Of two micro-batches, of this rank's stage."""
    mesh, model = em.init_mesh(parallel), copy.deepcopy(initial)
    torch.manual_seed(0)
    em.parallelize(model, mesh, lora=lora, activation_checkpointing=mode, compile=compile)  # type: ignore[arg-type]
    samples = [(ids.repeat(4)[:16], ids.repeat(4)[:16]) for ids, _ in rows_of_step(mesh.data_rank, ())[: 2 * rows]]
    em.forward_backward(model, [padded(samples[:rows]), padded(samples[rows:])], target_tokens=200)
    return {name: p.grad.full_tensor() for name, p in model.named_parameters() if isinstance(p.grad, DTensor)}


def _eager_and_compiled(
    family: str, mode: str, axes: dict[str, int], rows: int = 2, lora: em.LoraConfig | None = None
) -> tuple[float, int]:
    initial = random_model("Qwen3NextForCausalLM", family) if family == "qwen3_next" else tiny_model(family)
    parallel = em.ParallelConfig(ep=1, **axes)  # type: ignore[arg-type]
    expected = _gradients(initial, parallel, mode, False, rows, lora)
    torch._dynamo.utils.counters.clear()
    return _worst(_gradients(initial, parallel, mode, True, rows, lora), expected), _graphs()


@pytest.mark.slow_cases(r"(cp|pp|tp.*)", why="beside recurrences stays, and the graphs of all parts")
@pytest.mark.parametrize(
    ("family", "mode", "axes", "graphs"),
    [
        ("qwen3_moe", "selective", {"cp": 2}, 2),
        ("deepseek_v3", "full", {"pp": 2}, 2),
        ("gpt_oss", "selective", {"tp": 2}, 2),
        ("qwen3_next", "none", {}, 3),
    ],
    ids=["cp", "pp", "tp", "beside recurrences"],
)
def test_parts_compile_on_cp_pp_tp_and_beside_recurrences(
    family: str, mode: str, axes: dict[str, int], graphs: int
) -> None:
    with mock.patch.object(torch, "compile", TRACED), mock.patch.object(compiling, "_probe"):
        for distance, found in run_ranks(
            lambda: _eager_and_compiled(family, mode, axes), 2 if axes else 1, timeout=200
        ):
            assert distance <= TOLERANCE
            assert found >= graphs


def _graphs_of_layers(layers: int) -> int:
    """How many graphs rows of one length need on cp."""
    model = tiny_model("qwen3_moe", num_hidden_layers=layers)
    mesh = em.init_mesh(em.ParallelConfig(ep=1, cp=2))
    em.parallelize(model, mesh, compile=True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    _step(model, mesh, (14,))
    return _graphs()


@pytest.mark.slow(why="each of five layers is compiled if it fails; beside recurrences stays")
def test_layers_share_their_graphs_on_cp() -> None:
    with mock.patch.object(torch, "compile", TRACED), mock.patch.object(compiling, "_probe"):
        two, three = (run_ranks(partial(_graphs_of_layers, layers), 2, timeout=200) for layers in (2, 3))
    assert two == three


def _with_one_row(mode: str, lora: em.LoraConfig | None) -> tuple[float, list[str]]:
    """The distance from eager, and what FSDP2 said of views that were made of exchanged positions."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        distance, _ = _eager_and_compiled("qwen3_moe", mode, {"tp": 2}, 1, lora)
    return distance, [str(each.message) for each in said if "returned a view tensor" in str(each.message)]


@pytest.mark.slow(why="compiled parts on every axis stay")
@pytest.mark.parametrize(
    ("mode", "lora"), [("none", None), ("full", em.LoraConfig(r=4))], ids=["full weights", "adapters, checkpointed"]
)
def test_one_row_a_micro_batch_is_exchanged_into_no_view(mode: str, lora: em.LoraConfig | None) -> None:
    """The collectives write such rows in place, through a view."""
    with mock.patch.object(torch, "compile", TRACED), mock.patch.object(compiling, "_probe"):
        for distance, views in run_ranks(lambda: _with_one_row(mode, lora), 2, timeout=200):
            assert distance <= TOLERANCE
            assert not views


def test_what_carries_a_state_is_not_compiled() -> None:
    model = random_model("Qwen3NextForCausalLM", "qwen3_next")
    parts = list(compiled_parts(model, describe(model)))
    assert any("self_attn" in part for part in parts)
    assert any("shared_expert" in part for part in parts)
    assert not any("linear_attn" in part for part in parts)


def test_what_is_called_with_counts_of_rows_is_not_compiled() -> None:
    model = random_model("JetMoeForCausalLM", "jetmoe")
    parts = list(compiled_parts(model, describe(model)))
    norms = ("input_layernorm", "post_attention_layernorm")
    assert parts == [f"model.layers.{layer}.{norm}" for layer in (0, 1) for norm in norms]


def test_parts_are_whole_modules_beside_routers_and_experts() -> None:
    model = tiny_model("deepseek_v3")
    parts = list(compiled_parts(model, describe(model)))
    inside = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
    sparse = ("self_attn", "mlp.shared_experts", "input_layernorm", "post_attention_layernorm")
    assert parts == [f"model.layers.0.{part}" for part in inside] + [f"model.layers.1.{part}" for part in sparse]


def _refusal(tamper: Callable[[Any], None], **options: Any) -> str:
    model: Any = tiny_model("qwen3_moe")
    mesh = em.init_mesh(em.ParallelConfig(ep=1))
    try:
        em.parallelize(model, mesh, compile=True, **options)
        tamper(model)
        _step(model, mesh, (9,))
    except InputError as error:
        return str(error)
    return "nothing was refused"


def _breaks_the_graph(model: Any) -> None:
    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break(msg="a branch that depends on data")
        return hidden

    kind = type(model.model.layers[0].input_layernorm)
    mock.patch.object(kind, "forward", forward).start()
    compile_parts(model, compiled_parts(model, describe(model)), torch.device("cpu"))


def test_what_cannot_be_compiled_is_refused_by_name() -> None:
    with mock.patch.object(torch, "compile", TRACED), mock.patch.object(compiling, "_probe"):
        (broken,) = run_ranks(lambda: _refusal(_breaks_the_graph), 1)
        (dropout,) = run_ranks(lambda: _refusal(lambda model: None, lora=em.LoraConfig(dropout=0.1)), 1)
    assert broken.startswith(
        "train.compile: model.layers.0.input_layernorm (Qwen3MoeRMSNorm) cannot be compiled as one graph: "
    )
    assert broken.endswith("; set train.compile to false")
    assert dropout.startswith("train.compile: lora.dropout is 0.1, ")
    with refused("train.compile-with-frozen", naming="precision.frozen is nf4"):
        refuse_compile(None, "nf4")


def test_a_machine_without_a_compiler_is_refused_before_weights_are_read() -> None:
    import torch._inductor.config as inductor

    with mock.patch.object(inductor.cpp, "cxx", (None, "/nowhere/c++")):
        (refused,) = run_ranks(lambda: _refusal(lambda model: None), 1)
    assert "torch.compile does not work on cpu here: " in refused
    assert refused.endswith("install a C++ compiler (and Triton for an accelerator), or set train.compile to false")
