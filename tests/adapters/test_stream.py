"""`em.iter_hf_weights` gives, bit for bit, what `save_model` and `expertmesh merge` write, in every layout."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import expertmesh as em
from expertmesh.adapters import save as save_module
from expertmesh.adapters.plan import AdapterPlan
from expertmesh.adapters.save import _Values
from expertmesh.adapters.targets import Target
from expertmesh.config.errors import IntegrityError
from expertmesh.export.merge import merge
from expertmesh.io.boxes import full_box
from expertmesh.weights.lazy import LazyTensor, as_lazy
from expertmesh.weights.mapping import StateTensor
from tests.adapters.stock import write_family
from tests.support.errors import refused
from tests.support.models import tiny_model
from tests.support.ranks import shared_ranks

Layouts = list[dict[str, Any]]
TWO: Layouts = [{"ep": 2}, {"ep": 1}, {"ep": 2, "tp": 2}, {"ep": 1, "pp": 2}]
FOUR: Layouts = [{"ep": 4}, {"ep": 2, "replicate": 2}, {"ep": 2, "pp": 2}]
FP32 = em.PrecisionConfig(params="float32", compute="float32", reduce="float32")


def _files(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def _differing(streamed: dict[str, Tensor], files: dict[str, Tensor]) -> list[str]:
    """Names that only one of the two has, and those of which not every bit is the same."""
    both = streamed.keys() & files.keys()
    found = [
        name
        for name in both
        if streamed[name].dtype != files[name].dtype or not _same_bits(streamed[name], files[name])
    ]
    return sorted({*found, *(streamed.keys() ^ files.keys())})


def _same_bits(one: Tensor, other: Tensor) -> bool:
    flat, wanted = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return one.shape == other.shape and torch.equal(flat, wanted)


def _streamed(model: Any, **options: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in em.iter_hf_weights(model, **options)}


def _saved_and_streamed(family: str, layouts: Layouts, root: Path) -> list[list[str]]:
    found = []
    for number, layout in enumerate(layouts):
        model: Any = tiny_model(family)
        with torch.no_grad():
            model.model.layers[0].self_attn.o_proj.weight[0, :3] = -0.0  # a sum over ranks would lose the sign
        em.parallelize(model, em.init_mesh(em.ParallelConfig(**layout)))
        for dtype in (None, torch.bfloat16):
            directory = root / f"{number}-{dtype}"
            em.save_model(model, directory, dtype=dtype)
            found.append(_differing(_streamed(model, dtype=dtype), _files(directory)))
    return found


@pytest.mark.slow_cases(r"deepseek_v3-4-.*", why="two ranks stay, in four layouts")
@pytest.mark.parametrize(
    ("family", "world", "layouts"),
    [("qwen3_moe", 2, TWO), ("deepseek_v3", 4, FOUR), ("gpt_oss", 2, TWO[:2])],
)
def test_it_gives_what_save_model_writes(family: str, world: int, layouts: Layouts, tmp_path: Path) -> None:
    for found in shared_ranks(_saved_and_streamed, world, family, layouts, tmp_path):
        assert found == [[]] * (2 * len(layouts))


def _merged_and_streamed(root: Path, layouts: Layouts, dtype: str) -> list[tuple[list[str], list[str]]]:
    merged, base = _files(root / f"merged-{dtype}"), _files(root / "base")
    precision = em.PrecisionConfig(params="float32", compute=dtype, reduce="float32")  # type: ignore[arg-type]
    lora, found = em.LoraConfig(from_adapter=str(root / "adapter")), []
    for layout in layouts:
        mesh = em.init_mesh(em.ParallelConfig(**layout))
        model = em.load_model(root / "base", mesh, precision=precision, lora=lora)
        unmerged = _streamed(model, merge=False, dtype=torch.float32)
        known = {name: tensor.to(getattr(torch, dtype)).float() for name, tensor in base.items()}
        found.append((_differing(_streamed(model, dtype=getattr(torch, dtype)), merged), _differing(unmerged, known)))
    return found


@pytest.mark.slow_cases(
    r"(qwen3_moe|llama4)-.*", why="experts in one tensor stay; what is streamed is compared with save_model"
)
@pytest.mark.parametrize(
    ("family", "world", "layouts"),
    [("qwen3_moe", 2, TWO), ("qwen3_moe", 4, FOUR), ("gpt_oss", 2, TWO[:1]), ("llama4", 2, TWO[:1])],
)
def test_adapters_are_merged_as_the_command_merges_them(
    family: str, world: int, layouts: Layouts, tmp_path: Path
) -> None:
    write_family(family, tmp_path)
    merge(tmp_path / "adapter", tmp_path / "merged-float32")
    assert _differing(_files(tmp_path / "merged-float32"), _files(tmp_path / "base"))
    for found in shared_ranks(_merged_and_streamed, world, tmp_path, layouts, "float32"):
        assert found == [([], [])] * len(layouts)


def _with_a_bug(root: Path) -> list[str]:
    add = save_module.add_delta

    def twice(values: Tensor, box: Any, target: Any, factors: Any) -> None:
        for _ in range(2 if target.experts is not None else 1):
            add(values, box, target, factors)

    with mock.patch.object(save_module, "add_delta", twice):
        ((found, _),) = _merged_and_streamed(root, TWO[:1], "float32")
    return found


def test_experts_that_are_merged_wrongly_are_seen(tmp_path: Path) -> None:
    write_family("qwen3_moe", tmp_path)
    merge(tmp_path / "adapter", tmp_path / "merged-float32")
    for found in shared_ranks(_with_a_bug, 2, tmp_path):
        assert found
        assert all(".experts." in name for name in found)


class _Largest(TorchDispatchMode):
    """The most bytes that the result of any operation lies in, apart from the model's own."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.own = {parameter.to_local().untyped_storage().data_ptr() for parameter in model.parameters()}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if type(tensor) is Tensor and not tensor.is_meta:
                memory = tensor.untyped_storage()
                self.bytes = max(self.bytes, 0 if memory.data_ptr() in self.own else memory.nbytes())
        return result


def _measured() -> tuple[int, int, int]:
    model: Any = tiny_model("qwen3_moe", num_experts=32, moe_intermediate_size=64)
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=2)), lora=em.LoraConfig(r=2))
    own = max(parameter.to_local().numel() for parameter in model.parameters())
    largest = 0
    with _Largest(model) as watch:
        for _, tensor in em.iter_hf_weights(model):
            largest = max(largest, tensor.numel())
    return watch.bytes, 4 * largest, 4 * own


def test_memory_is_that_of_one_tensor() -> None:
    for seen, largest, own in shared_ranks(_measured, 2):
        # In fp64, and A and B of a layer's experts; a layer's experts themselves are many times that, on each rank too.
        assert seen <= 3 * largest
        assert own >= 10 * largest


def test_all_that_a_tensor_is_made_of_is_gathered_before_it_is_read() -> None:
    """Which parts a rank reads differs from rank to rank: a gathering then would wait for the others for ever."""
    targets = tuple(Target(name, None, 3, 2, None, "attention", r=1) for name in "qkv")
    shapes = {name: shape for target in targets for name, shape in zip(target.factors, target.shapes, strict=True)}
    adapters = {name: torch.ones(shape) for name, shape in shapes.items()}
    plan, view = AdapterPlan(em.LoraConfig(), targets, None, None), mock.Mock(adapters=adapters)
    values, leaves = _Values(view, plan), [StateTensor(target.weight, torch.zeros(2, 3)) for target in targets]
    with mock.patch.object(save_module, "gather", wraps=save_module.gather) as gathered:
        for _ in range(2):  # the second time nothing is missing
            values.prepare(as_lazy(torch.cat([LazyTensor.of(leaf) for leaf in leaves])))
            for leaf in leaves:
                values(leaf, full_box((2, 3)))
            assert gathered.call_count == 6
        for leaf in (leaves[1], leaves[2], leaves[1], leaves[2], leaves[0]):
            values.prepare(LazyTensor.of(leaf))
        assert gathered.call_count == 8


def _too_large() -> None:
    model: Any = tiny_model("qwen3_moe")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[7, 0, 0] = 1e6
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=2)))
    with refused("weights.dtype-too-narrow", IntegrityError, naming="layers.1.mlp.experts.7.down_proj"):
        for _ in em.iter_hf_weights(model, dtype=torch.float16):
            pass
    dist.barrier()


def test_what_the_dtype_cannot_hold_is_refused_on_every_rank() -> None:
    shared_ranks(_too_large, 2)


def test_it_works_in_one_process_without_ranks(tmp_path: Path) -> None:
    model: Any = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    assert _differing(_streamed(model), _files(tmp_path)) == []
