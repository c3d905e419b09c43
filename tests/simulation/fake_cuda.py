"""Whole training steps of one rank on fake CUDA tensors, by a build of torch for CPUs.

Called with the compiled no_cuda.cpp; reads variants, a line of JSON each, and prints for each what its second step did:
collectives with the devices of their tensors, copies between host and device, ops on the host alone, and the waits of
the expert layers. It finds tensors on the wrong device and waits that nobody meant; it finds neither races nor wrong
values. A process of its own: the library tells torch that there is a GPU, and has to be loaded first.
"""

import ctypes
import gc
import json
import sys
from collections import Counter, namedtuple
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
    gc.disable()  # while modules are imported

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from expertmesh.compat import TorchDispatchMode, tree_leaves
from expertmesh.config import LoraConfig, MoeConfig, OptimConfig, ParallelConfig, PrecisionConfig
from expertmesh.distributed.mesh import init_mesh
from expertmesh.experts import dispatch
from expertmesh.experts.balance import update_router_bias
from expertmesh.experts.deepep import Received
from expertmesh.experts.install import Kernels, gate_of
from expertmesh.model import ModelOptions, prepare_model
from expertmesh.parallel.shard_plan import ShardOptions
from expertmesh.simulation import expected_values, fake_buffers
from expertmesh.step.forward_backward import forward_backward
from expertmesh.step.grad_norm import clip_grad_norm_
from expertmesh.training.optimizers.build import build_optimizer
from expertmesh.weights.meta_model import materialize
from tests.support.models import tiny_config
from tests.support.planned import figures_of

CUDA, LENGTH, MICRO_BATCHES = torch.device("cuda", 0), 64, 2


class _Stream:
    """A stream or an event on which nothing runs."""

    device, priority, cuda_stream, stream_id, device_index, device_type = CUDA, 0, 0, 0, 0, 1

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: Any) -> None:
        pass


@contextmanager
def _one_h100() -> Iterator[None]:
    """Enough of torch.cuda for FSDP2 and DeviceMesh to find a GPU."""
    properties = namedtuple("Properties", "name major minor multi_processor_count total_memory")
    stream = _Stream()
    answers: dict[str, Any] = {
        "torch._subclasses.fake_tensor.init_gpu_context": None,
        "torch.distributed.fsdp._fully_shard._fsdp_init._move_states_to_device": None,
        "torch.cuda.is_available": True,
        "torch.cuda.is_initialized": True,
        "torch.cuda._lazy_init": None,
        "torch.cuda.device_count": 8,
        "torch.cuda.current_device": 0,
        "torch.cuda.set_device": None,
        "torch.cuda.synchronize": None,
        "torch.cuda.get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "torch.cuda.set_rng_state": None,
        "torch.cuda.current_stream": stream,
        "torch.cuda.default_stream": stream,
        "torch.cuda.stream": stream,
        "torch.cuda.get_device_capability": (9, 0),
        "torch.cuda.get_device_properties": properties("NVIDIA H100 80GB HBM3", 9, 0, 132, 80 << 30),
        "torch.accelerator.is_available": True,
        "torch.accelerator.current_accelerator": torch.device("cuda"),
        "torch.accelerator.device_count": 8,
        "torch.accelerator.current_stream": stream,
        "torch.accelerator.synchronize": None,
        "torch.accelerator.set_device_index": None,
        "torch.accelerator.current_device_index": 0,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch(name, lambda *_, answer=answer, **__: answer))
        stack.enter_context(patch("torch.cuda.Stream", _Stream))
        stack.enter_context(patch("torch.cuda.Event", _Stream))
        yield


class _Redirect(TorchFunctionMode):
    """Outside of the fake mode: what is made on the device, or moved to it, is a fake tensor."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.fake = fake

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device") or next((each for each in args[1:] if isinstance(each, torch.device)), None)
        if device is not None and torch.device(device).type == "cuda":
            with self.fake:
                return func(*args, **kwargs)
        return func(*args, **kwargs)


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.collectives, self.copies, self.on_host = Counter[str](), Counter[str](), Counter[str]()
        self.by_samples = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs, out)) if isinstance(each, torch.Tensor)]
        devices, name = sorted({tensor.device.type for tensor in tensors}), func._schema.name
        self.by_samples += name == "torch_attn::_varlen_attn"
        if name.startswith("c10d"):
            self.collectives[f"{name.removeprefix('c10d::')} on {' and '.join(devices)}"] += 1
        elif devices == ["cpu", "cuda"]:
            self.copies[name] += 1
        elif devices == ["cpu"]:
            self.on_host[name] += 1
        return out


def _run(variant: dict[str, Any]) -> dict[str, Any]:
    """One variant: `family`, `world`, `parallel`; if given `mode`, `lora`, `packed`, `samples`, `moe`, `triton`,
    `rows`, `layers` and `order` (of `forward_backward`).
    """
    config = tiny_config(variant["family"], **({"num_hidden_layers": variant["layers"]} if "layers" in variant else {}))
    lora = LoraConfig(**variant["lora"]) if variant.get("lora") else None
    precision = PrecisionConfig(params="float32", compute="bfloat16", reduce="float32")
    moe = MoeConfig(compute="grouped_mm", **variant.get("moe", {}))
    router = figures_of(config, precision=precision, lora=lora, length=LENGTH).experts.router
    dist.init_process_group("fake", rank=0, world_size=variant["world"])
    try:
        with _one_h100():
            mesh = init_mesh(ParallelConfig(**variant["parallel"]), num_experts=router.experts, device=CUDA)
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            shards = ShardOptions(precision, moe, variant.get("mode", "none"))
            with _Redirect(fake), _proven_kernels(variant.get("triton", False)), _deepep():
                model, _ = prepare_model(config, Path(), mesh, ModelOptions(precision, lora), shards)
            with fake:
                return _step(model, mesh, router, variant)
    finally:
        dist.destroy_process_group()


@contextmanager
def _proven_kernels(triton: bool) -> Iterator[None]:
    """Triton's kernels, as on a GPU that has run them."""

    def chosen(model: Any, anatomy: Any, *_: Any) -> Kernels:
        gates = ((spec.name, gate_of(model.get_submodule(spec.name), spec)) for spec in anatomy.experts)
        return Kernels(triton, {name: gate for name, gate in gates if gate is not None})

    with patch("expertmesh.parallel.shard_plan.choose_kernels", chosen):
        yield


class _DeepEP:
    """What DeepEP gives and takes, as shapes: the rows and pairs that all-to-alls would bring."""

    def __init__(self, group: Any, hidden: int) -> None:
        self.rows = 0

    def dispatch(
        self, rows_TH: torch.Tensor, index_TK: torch.Tensor, weight_TK: torch.Tensor, experts: int
    ) -> Received:
        _, rows, _, pairs = dispatch.to_host(index_TK)  # its one wait
        self.rows = sum(rows)
        given = (each.new_empty(self.rows, each.shape[1]) for each in (rows_TH, index_TK, weight_TK))
        return Received(len(rows_TH), *given, sum(pairs))

    def dispatch_again(self, rows_TH: torch.Tensor, handle: int) -> torch.Tensor:
        assert len(rows_TH) == handle
        return rows_TH.new_empty(self.rows, rows_TH.shape[1])

    def combine(self, rows_RH: torch.Tensor, handle: int, weight_RK: torch.Tensor | None = None) -> Any:
        assert rows_RH.shape[0] == self.rows
        weight = None if weight_RK is None else weight_RK.new_empty(handle, weight_RK.shape[1])
        return rows_RH.new_empty(handle, rows_RH.shape[1]), weight


@contextmanager
def _deepep() -> Iterator[None]:
    """The library, as if it were here."""
    with (
        patch("expertmesh.experts.deepep.refusal", lambda *_: None),
        patch("expertmesh.experts.deepep.Exchange", _DeepEP),
    ):
        yield


def _step(model: Any, mesh: Any, router: Any, variant: dict[str, Any]) -> dict[str, Any]:
    """The second step: in the first FSDP2 and the optimizer make what stays."""
    fake_buffers(model)
    materialize(model, mesh.device)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    optimizer = build_optimizer(model, OptimConfig(), seed=0)
    rows = variant.get("rows", 1)
    tokens = torch.zeros(rows, LENGTH, dtype=torch.int64, device=CUDA)
    micro = {"input_ids": tokens, "labels": tokens, "row_numbers": torch.zeros(rows, dtype=torch.int64, device=CUDA)}
    if variant.get("packed"):
        micro["attention_mask"] = torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=CUDA)
    borders = [(0, 20), (20, LENGTH)] if variant.get("samples") else None
    packed = patch("expertmesh.parallel.packing._borders", lambda _: borders)
    with expected_values(router, LENGTH, mesh.layout), packed:
        waits, counts = 0, dispatch.to_host

        def to_host(tensor: torch.Tensor) -> list[Any]:
            nonlocal waits
            waits += 1
            return counts(tensor)

        for watch in (_Watch(), _Watch()):
            waits = 0
            with watch, patch("expertmesh.experts.dispatch.to_host", to_host):
                micro_batches, order = [micro] * MICRO_BATCHES, variant.get("order", {})
                losses = forward_backward(model, micro_batches, target_tokens=LENGTH - 1, **order)
                norm = clip_grad_norm_(model, 1.0)
                optimizer.step()
                update_router_bias(model)
                optimizer.zero_grad()
    return {
        "elsewhere": [name for name, tensor in tensors if tensor.device.type != "cuda"],
        "results": sorted({losses.loss.device.type, norm.device.type}),
        "waits_of_experts": waits,
        "collectives": watch.collectives,
        "copies": watch.copies,
        "on_host": watch.on_host,
        "by_samples": watch.by_samples,
    }


if __name__ == "__main__":
    gc.freeze()  # a million imported objects stay
    gc.enable()
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)
