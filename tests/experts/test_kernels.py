"""Triton's kernels without a GPU: their values in Triton's interpreter, and what its compiler makes of them.

The interpreter is chosen by the environment when triton is imported, so one test runs this file again in a process that
has TRITON_INTERPRET=1; there `interpreted` tests run, and the others do not.
"""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from expertmesh.anatomy import describe
from expertmesh.config.errors import InputError
from expertmesh.experts import install, triton_ops
from expertmesh.experts.dispatch import AllToAllDispatcher
from expertmesh.experts.install import Kernels, choose_kernels, gate_of
from expertmesh.experts.lora_state import Dropout
from expertmesh.experts.mlp_spec import ExpertMlpSpec, Gate, activate, activation_backward
from expertmesh.experts.pairs import Segments, order_by_expert, segment_sum
from tests.experts.test_compute import VARIANTS, run_experts, variant_of
from tests.experts.test_compute import inputs_of as layer_inputs
from tests.experts.test_dispatch import EXPERTS, ROUTINGS, routed_inputs, sent_through
from tests.experts.test_lora import adapted_case, adapter_gradients, lean_experts
from tests.support.models import tiny_model
from tests.support.ranks import shared_ranks

INSTALLED, INTERPRETED = importlib.util.find_spec("triton") is not None, os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(not INSTALLED, reason="needs triton (the extra kernels)")
outside = pytest.mark.skipif(INTERPRETED, reason="runs outside of the interpreter")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="test_values_in_the_interpreter (slow) sets TRITON_INTERPRET")

SILU, GPT_OSS = Gate(), Gate(interleaved=True, alpha=1.702, limit=0.7, offset=1.0)
GATES = {"silu": SILU, "gpt-oss": GPT_OSS, "clamped": Gate(limit=0.5), "alternating": Gate(interleaved=True)}


@pytest.mark.slow(why="half a minute of Triton's interpreter; needs the extra kernels")
@needs_triton
@outside
def test_values_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) >= 40


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


@interpreted
@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
@pytest.mark.parametrize(("pairs", "width"), [(37, 96), (5, 1100), (1, 8), (0, 48)])
def test_activation_and_its_backward_equal_torch_and_double_precision(gate: Gate, pairs: int, width: int) -> None:
    torch.manual_seed(0)
    pre, grad, weight = torch.randn(pairs, 2 * width), torch.randn(pairs, width), torch.rand(pairs)
    mlp = ExpertMlpSpec(gate, silu_gated=gate == SILU, transposed=False, per_expert=False, triton=True, gate=gate)
    plain = ExpertMlpSpec(gate, silu_gated=gate == SILU, transposed=False, per_expert=False)

    def both(mlp: ExpertMlpSpec, dtype: torch.dtype) -> list[torch.Tensor]:
        tensors = [tensor.to(dtype, copy=True) for tensor in (pre, grad, weight)]
        return [activate(tensors[0], tensors[2], mlp), *activation_backward(*tensors, mlp)]

    got = both(mlp, torch.float32)
    for wide in (torch.float32, torch.float64):
        assert all(_error(*each) <= 1e-6 for each in zip(got, both(plain, wide), strict=True))
    half = both(mlp, torch.bfloat16)
    rounded = [tensor.to(torch.bfloat16).float() for tensor in (pre, grad, weight)]
    expected = [activate(rounded[0].clone(), rounded[2], plain), *activation_backward(*rounded, plain)]
    # The interpreter cuts bf16 off where a GPU rounds.
    assert all(_error(*each) <= 2**-7 for each in zip(half, expected, strict=True))


@interpreted
def test_nan_and_infinity_are_what_torch_makes_of_them() -> None:
    pre = torch.tensor([[float("nan"), 1.0, 1.0, float("inf"), -1.0, float("-inf")]])
    for gate in (SILU, GPT_OSS):
        got = triton_ops.swiglu(pre, torch.ones(1), *gate.flat())
        assert torch.equal(got.isnan(), gate(pre).isnan())


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_equal_torchs_bit_for_bit_and_have_no_atomics(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = torch.randn(50, 1100).to(dtype)
    item, start = torch.randint(50, (31,)), torch.tensor([0, 0, 1, 4, 9, 9, 31])  # from none to 22 items a row
    got = triton_ops.segment_sum(values[:, :1096], item, start)
    want = segment_sum(values[:, :1096].contiguous(), Segments(item, start))
    assert torch.equal(got, want) if dtype == torch.float32 else _error(got, want) <= 2**-7
    none = triton_ops.segment_sum(values[:0], item[:0], torch.zeros(4, dtype=torch.int64))
    assert none.shape == (3, 1100)
    assert not none.any()


@interpreted
@pytest.mark.parametrize(("items", "experts"), [(0, 8), (1, 1), (64, 3), (200, 6), (1000, 130)])
def test_the_sort_is_torchs_stable_one(items: int, experts: int) -> None:
    torch.manual_seed(0)
    expert = torch.randint(experts, (items,))
    want = order_by_expert(expert, experts, triton=False)
    for got, order in zip(order_by_expert(expert, experts, triton=True), want, strict=True):
        assert torch.equal(got, order)


@interpreted
def test_keys_need_not_be_neighbours() -> None:
    key = torch.tensor([[0, 9], [1, 9], [2, 9]])[:, :1].reshape(-1)
    assert not key.is_contiguous()
    assert torch.equal(order_by_expert(key, 10, True)[0], order_by_expert(key, 10, False)[0])


@interpreted
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("loop", [False, True], ids=["grouped_mm", "loop"])
def test_the_layer_gives_torchs_results_and_gradients(variant: str, loop: bool) -> None:
    torch.manual_seed(0)
    config = type("Config", (), {"_experts_implementation": "eager"})()
    experts = variant_of(**VARIANTS[variant])(config)
    inputs = layer_inputs(torch.float32)
    want = run_experts(experts, inputs, lean=True, loop=loop)
    with mock.patch.object(triton_ops, "swiglu", wraps=triton_ops.swiglu) as swiglu:
        got = run_experts(experts, inputs, lean=True, loop=loop, triton=True)
    assert swiglu.called == (variant != "not gated")
    assert all(_error(*each) <= 1e-6 for each in zip(got, want, strict=True))


@interpreted
@pytest.mark.parametrize("variant", ["silu gated", "gpt-oss"])
def test_adapters_with_dropout_get_torchs_gradients(variant: str) -> None:
    experts, spec, leaves, adapters = adapted_case(variant, torch.float32, 8)
    inputs = [leaves[0], leaves[2], *adapters.values()]
    dropout = Dropout(0.3, 7, torch.arange(20))
    want, got = (
        adapter_gradients(lean_experts(experts, spec, leaves, adapters, False, triton, dropout=dropout), inputs)
        for triton in (False, True)
    )
    assert all(_error(*each) <= 1e-6 for each in zip(got, want, strict=True))


@interpreted
def test_a_second_backward_through_what_was_used_up_raises() -> None:
    experts, spec, leaves, adapters = adapted_case("silu gated", torch.float32, 8)
    out = lean_experts(experts, spec, leaves, adapters, False, True)
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def _dispatched(triton: bool) -> list[torch.Tensor]:
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    inputs = routed_inputs(rank, ROUTINGS["spread"])
    return sent_through(AllToAllDispatcher(EXPERTS, group, triton), inputs, rank * EXPERTS // group.size())


@interpreted
def test_dispatch_and_combine_equal_torchs_bit_for_bit_on_ranks() -> None:
    for got, want in zip(shared_ranks(_dispatched, 4, True), shared_ranks(_dispatched, 4, False), strict=True):
        assert all(map(torch.equal, got, want))


@interpreted
def test_a_device_is_proven_by_results_and_an_error_of_a_kernel_is_told() -> None:
    cpu, gates = torch.device("cpu"), frozenset({SILU, GPT_OSS})
    refusal = install.triton_refusal.__wrapped__
    assert refusal(cpu, torch.float32, gates) is None
    assert refusal(cpu, torch.bfloat16, gates) is None
    assert refusal(cpu, torch.float64, gates) == "they compute in float32, and precision.compute is float64"
    right = triton_ops.segment_sum
    with mock.patch.object(triton_ops, "segment_sum", lambda *args: right(*args) * 1.01):
        assert refusal(cpu, torch.float32, gates) == "here segment_sum is 1.0e-02 off what torch gives"
    sort = triton_ops.counting_sort
    for keys in (2, 300):  # wrong for few or for many experts alone
        with mock.patch.object(
            triton_ops, "counting_sort", lambda key, n, bad=keys: sort(key.flip(0) if n == bad else key, n)
        ):
            assert "counting_sort is" in str(refusal(cpu, torch.float32, frozenset()))
    with mock.patch.object(triton_ops, "counting_sort", side_effect=RuntimeError("no kernel image\nfor the device")):
        assert refusal(cpu, torch.float32, gates) == "RuntimeError: no kernel image"


@interpreted
def test_compiled_code_and_fake_tensors_take_them_as_operators() -> None:
    checks = ("test_schema", "test_faketensor")
    pre, grad, weight = torch.randn(5, 16), torch.randn(5, 8), torch.rand(5)
    key, start = torch.tensor([1, 0, 1]), torch.tensor([0, 2, 3])
    torch.library.opcheck(triton_ops.swiglu, (pre, weight, *GPT_OSS.flat()), test_utils=checks)
    torch.library.opcheck(triton_ops.swiglu_backward_, (pre, grad, weight, *SILU.flat()), test_utils=checks)
    torch.library.opcheck(triton_ops.segment_sum, (pre, key, start), test_utils=checks)
    torch.library.opcheck(triton_ops.counting_sort, (key, 2), test_utils=checks)

    def layer(pre: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return triton_ops.segment_sum(triton_ops.swiglu(pre, weight, *SILU.flat()) * 2, key, start)

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(pre, weight), layer(pre, weight))


# Registers of a thread at most, so that an SM of 65,536 holds at least six programs of 128 threads.
MOST_REGISTERS = 80
FORMS = {
    "concatenated": {"WIDTH": 768, "BLOCK": 1024, "INTERLEAVED": False, "ALPHA": 1.0, "LIMIT": None, "OFFSET": 0.0},
    "GPT-OSS": {"WIDTH": 2880, "BLOCK": 1024, "INTERLEAVED": True, "ALPHA": 1.702, "LIMIT": 7.0, "OFFSET": 1.0},
}


@pytest.mark.slow(why="compiles and disassembles for three GPUs; needs the extra kernels")
@needs_triton
@outside
@pytest.mark.parametrize("sm", [80, 90, 100])
def test_compiled_for_a_gpu_none_spills_and_rows_move_16_bytes_at_once(sm: int, tmp_path: Path) -> None:
    rows = {"pre_ptr": "*bf16", "weight_ptr": "*fp32", "pre_stride": "i32"}
    with mock.patch.dict(os.environ, {"TRITON_CACHE_DIR": str(tmp_path)}):
        for form in FORMS.values():
            used = [_compiled("swiglu", sm, {**rows, "act_ptr": "*bf16"}, form)]
            back = {"grad_ptr": "*bf16", "grad_weight_ptr": "*fp32", "grad_stride": "i32"}
            used.append(_compiled("swiglu_backward", sm, {**rows, **back}, form))
            assert [loads for _, loads in used] == [2, 3]
        sums = {
            "values_ptr": "*bf16",
            "item_ptr": "*i64",
            "start_ptr": "*i64",
            "out_ptr": "*bf16",
            "values_stride": "i32",
        }
        used.append(_compiled("segment_sum", sm, sums, {"H": 2048, "BLOCK": 1024, "AT_ONCE": 4}))
        assert used[-1][1] == 4
        keys = {"key_ptr": "*i64", "count_ptr": "*i32", "N": "i32"}
        used.append(_compiled("count_keys", sm, keys, {"BLOCK": 64, "KEYS": 128}))
        places = {"end_ptr": "*i32", "order_ptr": "*i64", "place_ptr": "*i64"}
        used.append(_compiled("place_by_key", sm, {**keys, **places}, {"BLOCK": 64}))
    assert max(registers for registers, _ in used) <= MOST_REGISTERS


def _compiled(name: str, sm: int, types: dict[str, str], constants: dict[str, Any]) -> tuple[int, int]:
    """Registers of a thread and loads of 16 bytes. No thread has memory of its own, where registers would spill."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from expertmesh.experts import triton_kernels

    kernel = getattr(triton_kernels, name)
    signature = {argument: types.get(argument, "constexpr") for argument in kernel.arg_names}
    aligned = [place for place, argument in enumerate(signature) if argument.endswith(("_ptr", "_stride"))]
    attributes = {(place,): [["tt.divisibility", 16]] for place in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", sm, 32)).asm["cubin"]
    tool = Path(triton.__file__).with_name("backends") / "nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        said = [
            subprocess.run([tool, what, file.name], capture_output=True, text=True, check=True).stdout
            for what in ("-res-usage", "-sass")
        ]
    (registers, stack, local) = re.findall(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", said[0])[0]
    assert (stack, local) == ("0", "0"), f"{name} spills on sm_{sm}"
    return int(registers), len(re.findall(r"\bLDG\.E[.\w]*\.128", said[1]))


@outside
def test_gates_of_families_are_known_by_what_they_compute() -> None:
    def gates(family: str, **changes: Any) -> set[Gate | None]:
        model = tiny_model(family, **changes)
        return {gate_of(model.get_submodule(spec.name), spec) for spec in describe(model).experts}

    assert gates("qwen3_moe") == {SILU}
    assert gates("gpt_oss") == {Gate(interleaved=True, alpha=1.702, limit=7.0, offset=1.0)}
    assert gates("qwen3_moe", hidden_act="gelu") == {None}


@outside
def test_a_cpu_has_torchs_kernels_and_tritons_are_refused_by_name() -> None:
    model = tiny_model("qwen3_moe")
    anatomy = describe(model)
    assert choose_kernels(model, anatomy, "auto", torch.bfloat16) == Kernels()
    with pytest.raises(InputError, match=r"moe\.kernels: triton cannot be used here: there is no GPU") as caught:
        choose_kernels(model, anatomy, "triton", torch.bfloat16)
    assert caught.value.key == "moe.kernels-unsupported"


@outside
def test_a_gpu_runs_tritons_once_it_is_proven_and_else_torchs_which_is_said() -> None:
    model = tiny_model("qwen3_moe")
    anatomy = describe(model)
    with mock.patch.multiple("torch.cuda", is_available=lambda: True, current_device=lambda: 0):
        # In a launcher, which has no process group, the device is left alone.
        assert not choose_kernels(model, anatomy, "triton", torch.bfloat16).triton
        with mock.patch.multiple("torch.distributed", is_initialized=lambda: True, get_backend=lambda: "nccl"):
            for refusal in (None, "RuntimeError: no kernel image"):
                with mock.patch("expertmesh.experts.install.triton_refusal", return_value=refusal) as asked:
                    chosen = choose_kernels(model, anatomy, "auto", torch.bfloat16)
                assert asked.call_args.args == (torch.device("cuda", 0), torch.bfloat16, frozenset({SILU}))
                assert chosen.triton == (refusal is None)
                assert chosen.text == ("triton" if refusal is None else f"torch (not triton: {refusal})")
            with (
                mock.patch("expertmesh.experts.install.triton_refusal", return_value=refusal),
                pytest.raises(InputError, match="no kernel image"),
            ):
                choose_kernels(model, anatomy, "triton", torch.bfloat16)
