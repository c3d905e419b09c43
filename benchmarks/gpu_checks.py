"""What has to be right on a GPU, each thing compared with the same on the CPU in a wider dtype, or with itself.

Stages of gpu.py, and the tests of `pytest -m gpu`: a row with `ok` is a check, with the figures that it looked at.

    P pairs, L experts, T tokens, K top-k, H hidden, I intermediate, N columns
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

import expertmesh as em
from benchmarks.gpu import Row, environment
from benchmarks.gpu_stage import Run, Stage, checked, error, start_one_rank
from benchmarks.result import machine
from expertmesh.anatomy import describe
from expertmesh.experts.dispatch import AllToAllDispatcher
from expertmesh.experts.expert_mlp import grouped_mm
from expertmesh.experts.install import triton_refusal
from expertmesh.experts.layer import layer_of
from expertmesh.experts.lora_state import Dropout, keep_mask
from expertmesh.experts.mlp_spec import ExpertMlpSpec, Gate, activation_backward
from expertmesh.experts.pairs import count_pairs, segment_sum, segments_of
from expertmesh.launcher.worker import take_deterministic_algorithms
from tests.support.models import tiny_model
from tests.support.reference import Distance, reference, train_sharded

FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss", "mixtral")
FP32, BF16 = 1e-5, 1e-2
# Steps of a whole model; of bf16, how much further from fp32 than the same on a CPU, where other experts are chosen.
STEPS_FP32, STEPS_BF16 = 1e-4, 2.0
# Ranks that share the device: gloo carries CUDA tensors, NCCL refuses two ranks on one.
RANKS = 4
GPT_OSS_GATE = Gate(interleaved=True, alpha=1.702, limit=7.0, offset=1.0)
LAYOUTS: dict[str, dict[str, int]] = {
    "qwen3_moe": {"ep": 4}, "deepseek_v3": {"ep": 2}, "gpt_oss": {"ep": 2, "replicate": 2},
    "qwen3_moe, tp": {"ep": 2, "tp": 2}, "qwen3_moe, cp": {"ep": 2, "cp": 2}, "qwen3_moe, pp": {"ep": 2, "pp": 2},
}  # fmt: skip


def of_environment(run: Run) -> Iterator[Row]:
    """Versions and device; everything imports."""
    for module in ("cli.main", "export.merge", "training.run", "verification.run"):
        try:
            importlib.import_module(f"expertmesh.{module}")
            yield {"case": f"import {module}", "ok": True}
        except Exception as problem:
            yield {"case": f"import {module}", "said": f"{type(problem).__name__}: {problem}", "ok": False}
    yield machine() | {"platform": platform.platform(), "cuda_visible": torch.cuda.is_available()}
    if run.device.type == "cuda":
        properties = torch.cuda.get_device_properties(run.device)
        yield {
            "name": properties.name, "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory, "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "triton": _version("triton"),
        }  # fmt: skip


def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


COUNTS = {
    "even": [64] * 8, "first empty": [0, 3, 100, 1], "last empty": [7, 300, 5, 0], "middle empty": [5, 0, 0, 129],
    "one pair": [0, 0, 1, 0], "skewed": [4096, 1, 0, 7], "no pairs": [0, 0, 0, 0], "1023 experts": [3, 0, 1] * 341,
}  # fmt: skip


def of_grouped_mm(run: Run) -> Iterator[Row]:
    """Check every product that a layer takes, where a kernel may differ: empty experts, no pairs, odd counts, used
    memory.
    """
    for dtype, limit in ((torch.bfloat16, BF16), (torch.float32, FP32)):
        for name, counts in COUNTS.items():
            torch.manual_seed(0)
            experts, pairs, inner, columns = len(counts), sum(counts), 128, 192
            shapes = ((pairs, inner), (experts, columns, inner), (pairs, columns))
            a_PH, weight_LNH, grad_PN = (torch.randn(shape).to(run.device, dtype) for shape in shapes)
            end_L = torch.tensor(counts).cumsum(0).to(run.device, torch.int32)
            products = {
                "forward": partial(grouped_mm, a_PH, weight_LNH.transpose(1, 2), end_L),
                "input_gradient": partial(grouped_mm, grad_PN, weight_LNH, end_L),
                "weight_gradient": partial(grouped_mm, grad_PN.t(), a_PH, end_L),
            }
            errors = {}
            for product, multiply in products.items():
                _leave_nan(shapes, run.device, dtype)
                errors[product] = error(multiply(), _products(product, a_PH, weight_LNH, grad_PN, counts))
            yield checked(f"{name}, {dtype}", limit, **errors)


def _leave_nan(shapes: Any, device: torch.device, dtype: torch.dtype) -> None:
    """What the allocator hands out next is not zero by chance."""
    blocks = [torch.full(shape, float("nan"), device=device, dtype=dtype) for shape in shapes for _ in range(2)]
    del blocks


def _products(
    which: str, a_PH: torch.Tensor, weight_LNH: torch.Tensor, grad_PN: torch.Tensor, counts: list[int]
) -> torch.Tensor:
    """Expert by expert, in fp64 on the CPU."""
    a, weight, grad = (tensor.cpu().double() for tensor in (a_PH, weight_LNH, grad_PN))
    spans = list(itertools.starmap(slice, itertools.pairwise([0, *itertools.accumulate(counts)])))
    if which == "weight_gradient":
        return torch.stack([grad[span].t() @ a[span] for span in spans])
    if which == "forward":
        return torch.cat([a[span] @ each.t() for span, each in zip(spans, weight, strict=True)])
    return torch.cat([grad[span] @ each for span, each in zip(spans, weight, strict=True)])


def of_kernels(run: Run) -> Iterator[Row]:
    """Pieces around the products, whose code on a device is other code than on a CPU."""
    torch.manual_seed(0)
    device, pairs, rows = run.device, 5000, 701
    pre, grad, weight_P = torch.randn(pairs, 512), torch.randn(pairs, 256), torch.rand(pairs)
    mlp = ExpertMlpSpec(nn.Identity(), True, False, False)
    names = ("activation", "pre_activation_gradient", "weight_gradient")
    expected = activation_backward(pre.double(), grad.double(), weight_P.double(), mlp)
    row_P, values = torch.randint(rows - 1, (pairs,)), torch.randn(pairs, 256)
    segments, on_cpu = segments_of(row_P.to(device), rows), segments_of(row_P, rows)
    sums = torch.zeros(rows, 256, dtype=torch.float64).index_add(0, row_P, values.double())
    for dtype, limit in ((torch.float32, FP32), (torch.bfloat16, BF16)):
        copies = (tensor.to(device, dtype, copy=True) for tensor in (pre, grad))
        got = activation_backward(*copies, weight_P.to(device), mlp)
        yield checked(f"activation, {dtype}", limit, **dict(zip(names, map(error, got, expected), strict=True)))
        yield checked(f"segment sum, {dtype}", limit, sum=error(segment_sum(values.to(device, dtype), segments), sums))
        if device.type == "cuda":
            refusal = triton_refusal(device, dtype, frozenset((Gate(), GPT_OSS_GATE)))
            yield {"case": f"Triton's kernels, {dtype}", "refused": refusal, "ok": refusal is None}
    index = torch.randint(128, (4096, 8))
    dropout = Dropout(0.1, 12345678901234567, torch.arange(4096))
    on_device = dataclasses.replace(dropout, token_numbers=dropout.token_numbers.to(device))
    pairs_of = {
        "segments": (segments.item_P, on_cpu.item_P),
        "starts of segments": (segments.start_R1, on_cpu.start_R1),
        "counted pairs": (count_pairs(index.to(device), 128), count_pairs(index, 128)),
        "dropout": (keep_mask(on_device, 300, torch.float32), keep_mask(dropout, 300, torch.float32)),
    }
    for name, (ours, theirs) in pairs_of.items():
        yield {"case": f"{name} as on the CPU", "ok": torch.equal(ours.cpu(), theirs)}


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    """What an experts module is called with, and the gradient that comes back; on the CPU, in fp32."""

    hidden_TH: torch.Tensor
    index_TK: torch.Tensor
    weight_TK: torch.Tensor
    grad_TH: torch.Tensor


def of_layer(run: Run) -> Iterator[Row]:
    """Whole expert layers as they are installed, against the family's own code in fp64, for odd routings.

    The second dispatcher sends everything to this rank itself, through the device's own collectives.
    """
    start_one_rank(run)
    cases = itertools.product(
        ("qwen3_moe", "gpt_oss"), ("float32", "bfloat16"), run.pick(("torch", "triton"), ("torch",))
    )
    for family, dtype, kernels in cases:
        limit = FP32 if dtype == "float32" else BF16
        config = {"hidden_size": 128, "intermediate_size" if family == "gpt_oss" else "moe_intermediate_size": 64}
        model: Any = tiny_model(family, **config, initializer_range=0.05)
        exact = copy.deepcopy(_experts(model)[1]).double()
        precision: Any = em.PrecisionConfig(params="float32", compute=dtype, reduce="float32")  # type: ignore[arg-type]
        mesh = em.init_mesh(em.ParallelConfig(ep=1), device=run.device)
        em.parallelize(model, mesh, precision=precision, moe=em.MoeConfig(kernels=kernels))
        _, experts = _experts(model)
        for dispatch in ("here", "all-to-all"):
            if dispatch == "all-to-all":
                layer, world = layer_of(experts), dist.group.WORLD
                assert world is not None
                layer.dispatcher = AllToAllDispatcher(group=world, **dataclasses.asdict(layer.dispatcher))
            for tokens, chosen in ((257, 8), (3, 8), (64, 2), (0, 8)):
                call = _call(tokens, chosen)
                for _ in range(3):  # the later ones in memory that was used before
                    got = _results(experts, call, run.device)
                name = f"{family}, {dtype}, {kernels}, {dispatch}, {tokens} tokens of {chosen} experts"
                yield checked(name, limit, **_errors(got, _results(exact, call, torch.device("cpu"), torch.float64)))


def _experts(model: PreTrainedModel) -> tuple[str, Any]:
    name = describe(model).experts[-1].name
    return name, model.get_submodule(name)


def _call(tokens: int, chosen: int, top_k: int = 2, hidden: int = 128) -> _Call:
    random = torch.Generator().manual_seed(tokens)
    index_TK = torch.rand(tokens, chosen, generator=random).argsort(1)[:, :top_k]
    values = [torch.randn(tokens, hidden, generator=random).bfloat16().float() for _ in range(2)]
    return _Call(values[0], index_TK, torch.rand(tokens, top_k, generator=random), values[1])


def _results(
    experts: Any, call: _Call, device: torch.device, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Return the output, and the gradients of everything."""
    experts.zero_grad()
    hidden_TH, weight_TK, grad_TH = (
        tensor.to(device, dtype, copy=True) for tensor in (call.hidden_TH, call.weight_TK, call.grad_TH)
    )
    out_TH = experts(hidden_TH.requires_grad_(), call.index_TK.to(device), weight_TK.requires_grad_())
    if out_TH.requires_grad:  # plain code that ran no expert gives a constant
        out_TH.backward(grad_TH)
    gradients = {name: parameter.grad for name, parameter in experts.named_parameters()}
    whole = {name: getattr(gradient, "full_tensor", lambda g=gradient: g)() for name, gradient in gradients.items()}
    return {"output": out_TH.detach(), "hidden": hidden_TH.grad, "weight": weight_TK.grad, **whole}  # type: ignore[dict-item]


def _errors(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return zeros for what plain code leaves without a gradient: nothing went there."""
    nothing = torch.zeros(())
    return {
        name: error(tensor, nothing if expected[name] is None else expected[name]) if tensor.numel() else 0.0
        for name, tensor in got.items()
    }


def of_waits(run: Run) -> Iterator[Row]:
    """Count how often the host waits for the device in an expert layer: torch's own watcher tells, on CUDA alone."""
    start_one_rank(run)
    model: Any = tiny_model("qwen3_moe", hidden_size=128, moe_intermediate_size=64)
    # Products in float32 wait: torch has no grouped kernel for them, so experts run one after the other.
    precision: Any = em.PrecisionConfig(params="float32", compute="bfloat16", reduce="float32")
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=1), device=run.device), precision=precision)
    _, experts = _experts(model)
    for dispatch, allowed in (("here", 0), ("all-to-all", 1)):
        if dispatch == "all-to-all":
            layer, world = layer_of(experts), dist.group.WORLD
            assert world is not None
            layer.dispatcher = AllToAllDispatcher(group=world, **dataclasses.asdict(layer.dispatcher))
        call = _call(512, 8)
        _results(experts, call, run.device)  # what is built once
        hidden_TH = call.hidden_TH.to(run.device).requires_grad_()
        index_TK, weight_TK = call.index_TK.to(run.device), call.weight_TK.to(run.device).requires_grad_()
        forward, out_TH = _waits(run, lambda i=index_TK, h=hidden_TH, w=weight_TK: experts(h, i, w))
        backward, _ = _waits(run, lambda o=out_TH: o.backward(torch.ones_like(o)))
        right = len(forward) <= allowed and not backward
        yield {"case": dispatch, "forward": forward, "backward": backward, "allowed": allowed, "ok": right}


def _waits(run: Run, call: Callable[[], Any]) -> tuple[list[str], Any]:
    """Return where the host waited."""
    on_cuda = run.device.type == "cuda"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if on_cuda:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("warn")
        try:
            result = call()
        finally:
            if on_cuda:
                torch.cuda.set_sync_debug_mode("default")
    places = [(str(warning.message), f"{Path(warning.filename).name}:{warning.lineno}") for warning in seen]
    return [place for message, place in places if "called a synchronizing" in message], result


def of_parity(run: Run) -> Iterator[Row]:
    """Training steps of whole models on this device: fp32 against the unsharded model on the CPU; bf16 no further from
    it than the same code on the CPU, and twice that.
    """
    start_one_rank(run)
    one = em.ParallelConfig(ep=1)
    for family, mode in zip(FAMILIES, ("none", "selective", "full", "none"), strict=True):
        expected = reference(family)
        found = train_sharded(expected, one, device=run.device, activation_checkpointing=mode)
        yield checked(f"{family}, float32, {mode}", STEPS_FP32, **distances(found))
        both = {}
        for device in (run.device, torch.device("cpu")):
            precision = em.PrecisionConfig(params="float32", compute="bfloat16", reduce="float32")
            moe = em.MoeConfig(kernels="torch" if device.type == "cpu" else "auto")
            both[device] = train_sharded(expected, one, moe=moe, device=device, precision=precision)
        ours, theirs = (distances(each) for each in (both[run.device], both[torch.device("cpu")]))
        yield checked(
            f"{family}, bfloat16 as multiples of the CPU's errors", STEPS_BF16,
            **{name: ours[name] / max(theirs[name], 1e-3) for name in ours},
        )  # fmt: skip


def distances(found: Distance) -> dict[str, float]:
    return {"loss": found.loss, "norm": found.norm, "gradient": found.gradient[0], "weight": found.weight[0]}


def of_ranks(run: Run) -> Iterator[Row]:
    """Check every axis, by ranks that share this device: sums and layouts are right on CUDA. It says nothing about
    NCCL.
    """
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_ranks", f"{scratch}/store", f"{scratch}/rows"]
        shared = {"WORLD_SIZE": str(RANKS), "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
        start = partial(subprocess.Popen, command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        ranks = [start(env=environment({**shared, "RANK": str(rank)})) for rank in range(RANKS)]
        said = [process.communicate()[1] for process in ranks]
        rows = Path(scratch, "rows")
        yield from map(json.loads, rows.read_text(encoding="utf-8").splitlines() if rows.exists() else ())
        for rank, (process, stderr) in enumerate(zip(ranks, said, strict=True)):
            if process.returncode:
                yield {"case": f"rank {rank}", "ended": process.returncode, "said": stderr[-1500:], "ok": False}


def of_checkpoint(run: Run) -> Iterator[Row]:
    """Check that a resumed run equals the uninterrupted one, bit for bit: weights, moments, generators."""
    take_deterministic_algorithms()
    start_one_rank(run)

    def job() -> tuple[Any, torch.optim.Optimizer]:
        mesh = em.init_mesh(em.ParallelConfig(ep=1), device=run.device)
        model: Any = em.parallelize(tiny_model("qwen3_moe"), mesh)  # type: ignore[arg-type]
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    model, optimizer = job()
    _steps(run, model, optimizer, range(3))
    with tempfile.TemporaryDirectory() as scratch:
        em.save_checkpoint(model, optimizer, scratch, step=3)
        drawn = torch.rand(5, device=run.device)
        _steps(run, model, optimizer, range(3, 6))
        resumed, its_optimizer = job()
        em.load_checkpoint(resumed, its_optimizer, scratch)
        generators = bool(torch.equal(drawn, torch.rand(5, device=run.device)))
        _steps(run, resumed, its_optimizer, range(3, 6))
    errors = {
        name: error(other.to_local(), own.to_local())
        for (name, own), other in zip(model.named_parameters(), resumed.parameters(), strict=True)
    }
    different = sum(each > 0 for each in errors.values())
    yield {"case": "generators of the device go on", "ok": generators}
    yield {"case": "resumed", "different_tensors": different, "worst": max(errors.values()), "ok": not different}


def _steps(run: Run, model: Any, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        random = torch.Generator().manual_seed(number)
        ids = torch.randint(96, (4, 32), generator=random).to(run.device)
        em.forward_backward(model, [{"input_ids": ids, "labels": ids}], target_tokens=4 * 31)
        em.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def of_determinism(run: Run) -> Iterator[Row]:
    """Check that an expert layer gives the same bits again, and with `train.deterministic` a full model."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS reads it once
    start_one_rank(run)
    model: Any = tiny_model("qwen3_moe", hidden_size=128, moe_intermediate_size=64)
    mesh = em.init_mesh(em.ParallelConfig(ep=1), device=run.device)
    precision: Any = em.PrecisionConfig(params="float32", compute="bfloat16", reduce="float32")
    em.parallelize(model, mesh, precision=precision)
    _, experts = _experts(model)
    first, *others = (_results(experts, _call(2000, 8), run.device) for _ in range(3))
    differ = [name for other in others for name in other if not torch.equal(other[name], first[name])]
    yield {"case": "expert layer", "differ": differ, "ok": not differ}
    yield {"case": "step of a model", "repeats": _repeats(run, model)}
    take_deterministic_algorithms()
    yield {"case": "step of a model, train.deterministic", "ok": _repeats(run, model)}


def _repeats(run: Run, model: Any) -> bool:
    """Return whether a step's gradients are the same three times."""
    ids = torch.randint(96, (4, 128), generator=torch.Generator().manual_seed(0)).to(run.device)
    first, *others = (_gradients(model, ids) for _ in range(3))
    return all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def _gradients(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    em.forward_backward(model, [{"input_ids": ids, "labels": ids}], target_tokens=em.count_targets(ids))
    return [parameter.grad.to_local().clone() for parameter in model.parameters()]


STAGES: dict[str, Stage] = {
    "environment": of_environment, "grouped_mm": of_grouped_mm, "kernels": of_kernels, "layer": of_layer,
    "waits": of_waits, "parity": of_parity, "ranks": of_ranks, "checkpoint": of_checkpoint,
    "determinism": of_determinism,
}  # fmt: skip
