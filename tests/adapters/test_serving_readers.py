"""What vLLM's and SGLang's own readers make of our adapters: for every expert and matrix the product that was trained.

Runs their code where `vllm` or `sglang` can be found, also as an unpacked wheel without its dependencies on PYTHONPATH:
`pip download --no-deps vllm sglang`, unzip. Only the readers are theirs; everything around them is a stand-in.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import expertmesh as em
from expertmesh.adapters.save import unread_by_engines
from expertmesh.cli.main import main
from expertmesh.model import ModelOptions, build_model
from expertmesh.state.model_view import sharded
from tests.adapters.stock import base_model, write_family
from tests.support.ranks import shared_ranks

READERS = {
    "vllm": (
        "vllm.lora.lora_model",
        "vllm.lora.lora_weights",
        "vllm.lora.peft_helper",
        "vllm.lora.utils",
        "vllm.lora.model_manager",
    ),
    "sglang": ("sglang.srt.lora.lora", "sglang.srt.lora.lora_config", "sglang.srt.lora.utils"),
}
EXPERTS, RANK = 8, 4
WITH = {
    package: pytest.mark.skipif(
        importlib.machinery.PathFinder.find_spec(package) is None,
        reason=f"needs {package}, installed or as an unpacked wheel on PYTHONPATH",
    )
    for package in READERS
}
PER_EXPERT = {
    "qwen3_moe": ("gate_proj", "down_proj", "up_proj"),
    "deepseek_v3": ("gate_proj", "down_proj", "up_proj"),
    "mixtral": ("w1", "w2", "w3"),
}


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Mocks for all modules of a package but its readers."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        ours = name == self.package or name.startswith(f"{self.package}.")
        if not ours or name in READERS[self.package]:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = _Mocked(spec.name)
        root = importlib.machinery.PathFinder.find_spec(self.package)
        assert root is not None
        base = Path(root.origin).parent if root.origin else Path(next(iter(root.submodule_search_locations or ())))
        module.__path__ = [str(base.joinpath(*spec.name.split(".")[1:]))]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Mocked(ModuleType):
    PIN_MEMORY = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        generic = {"__class_getitem__": classmethod(lambda cls, item: cls)}
        value = type(name, (), generic) if name[0].isupper() else mock.MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


@contextmanager
def readers(package: str) -> Iterator[list[Any]]:
    """The package's readers, imported without the rest of it."""
    before, finder = set(sys.modules), _StandIns(package)
    sys.meta_path.insert(0, finder)
    try:
        yield [importlib.import_module(name) for name in READERS[package]]
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == package:
                del sys.modules[name]


def _load_and_write(root: Path) -> None:
    mesh = em.init_mesh(em.ParallelConfig(ep=2), num_experts=EXPERTS)
    lora = em.LoraConfig(from_adapter=str(root / "adapter"))
    precision = em.PrecisionConfig(params="float32", compute="float32", reduce="float32")
    model = em.load_model(root / "base", mesh, precision=precision, lora=lora)
    em.save_adapter(model, root / "peft")
    em.save_checkpoint(model, None, root / "checkpoints", step=1)


def _written(family: str, root: Path) -> tuple[Path, Path | None]:
    """Our directory in PEFT's format and, where the family has names for it, the one with keys for each expert."""
    write_family(family, root)
    shared_ranks(_load_and_write, 2, root)
    if family not in PER_EXPERT:
        return root / "peft", None
    checkpoint = str(root / "checkpoints" / "step-00000001")
    assert main(["export", checkpoint, "--output", str(root / "each"), "--adapter-format", "per-expert"]) == 0
    return root / "peft", root / "each"


@pytest.mark.parametrize(
    ("family", "lora", "says"),
    [
        ("qwen3_moe", {}, ["vLLM, SGLang: experts of this family from keys for each expert"]),
        ("gpt_oss", {}, ["SGLang: no adapters on experts that a model's files keep in one tensor"]),
        ("mixtral", {"targets": ["experts.down_proj"]}, ["vLLM, SGLang: experts", "on down_proj alone"]),
        ("deepseek_v3", {"targets": ["kv_b_proj", "router"]}, ["vLLM: kv_b_proj", "SGLang: routers"]),
        ("qwen3_moe", {"targets": ["q_proj"]}, ["without both q_proj and v_proj"]),
        ("qwen3_moe", {"targets": ["attention"], "r": 1024}, ["vLLM: rank 1024; it takes 512 at most"]),
        (
            "qwen3_moe",
            {"targets": ["attention"], "use_rslora": True},
            ["set lora_alpha to 128 and use_rslora to false"],
        ),
        ("qwen3_moe", {"targets": ["attention"]}, []),
    ],
)
def test_what_engines_cannot_read_is_said_by_name(family: str, lora: dict[str, Any], says: list[str]) -> None:
    model = base_model(family)
    adapted = build_model(model.config, Path(), ModelOptions(em.PrecisionConfig(), em.LoraConfig(**lora)))
    plan = sharded(adapted).lora_plan
    assert plan is not None
    for sentence, part in zip(unread_by_engines(adapted, plan), says, strict=True):
        assert part in sentence


def _products(directory: Path, experts: str) -> tuple[Tensor, Tensor]:
    """B·A of gate and up `[E, 2I, H]` and of down `[E, H, I]`, from PEFT's own layout, without scaling."""
    files = load_file(directory / "adapter_model.safetensors")

    def product(name: str) -> Tensor:
        a, b = files[f"base_model.model.{name}.lora_A.weight"], files[f"base_model.model.{name}.lora_B.weight"]
        a_ERI = a.unflatten(0, (EXPERTS, RANK))
        return b.unflatten(1, (RANK, EXPERTS)).permute(2, 0, 1) @ a_ERI

    return product(f"{experts}.base_layer"), product(experts)


def _load_in_vllm(modules: list[Any], directory: Path, expected: set[str]) -> Any:
    lora_model, _, peft_helper, *_ = modules
    helper = peft_helper.PEFTHelper.from_local_dir(str(directory), None)
    assert helper.vllm_lora_scaling_factor == 2.0
    return lora_model.LoRAModel.from_local_checkpoint(
        str(directory), expected, helper, lora_model_id=1, device="cpu", dtype=torch.float32
    )


ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "gate"}
OTHERS = {"gate_proj", "up_proj", "down_proj", "lm_head", "router", "score"}


@WITH["vllm"]
@pytest.mark.parametrize("family", PER_EXPERT)
def test_vllm_reads_keys_for_each_expert(family: str, tmp_path: Path) -> None:
    fused, each = _written(family, tmp_path)
    assert each is not None
    home = "block_sparse_moe" if family == "mixtral" else "mlp"
    names = [f"experts.{expert}.{leaf}" for expert in range(EXPERTS) for leaf in PER_EXPERT[family]]
    with readers("vllm") as modules:
        model = _load_in_vllm(modules, each, {*names, *ATTENTION, *OTHERS})
        layer = next(name for name in model.loras if f"{home}.experts.0." in name).partition(f".{home}")[0]
        packed = modules[1].PackedLoRALayerWeights.pack_moe(
            [model.loras[f"{layer}.{home}.{name}"] for name in names], "experts"
        )
        w1, w2, w3 = (b @ a for a, b in zip(packed.lora_a, packed.lora_b, strict=True))
    up, down = _products(fused, f"{layer}.mlp.experts")
    assert torch.equal(torch.cat([w1, w3], dim=1), up)
    assert torch.equal(w2, down)


@WITH["vllm"]
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_vllm_reads_pefts_own_format_where_it_keeps_experts_together(family: str, tmp_path: Path) -> None:
    """As GPT-OSS's class has it, and others with --enable-mixed-moe-lora-format."""
    fused, _ = _written(family, tmp_path)
    architecture = {"gpt_oss": "GptOssForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}[family]
    with readers("vllm") as modules:
        model = _load_in_vllm(modules, fused, {"experts", *ATTENTION, *OTHERS})
        name = next(name for name in model.loras if name.endswith(".mlp.experts"))
        manager = modules[4].LoRAModelManager
        home: Any = SimpleNamespace(
            model=SimpleNamespace(config=SimpleNamespace(architectures=[architecture])),
            _get_lora_layer_weights=lambda lora, key: lora.loras.get(key),
            _pop_lora_weights=lambda lora, keys: [lora.loras.pop(key, None) for key in keys],
            _is_3d_moe_model=True,
        )
        module = SimpleNamespace(local_num_experts=EXPERTS, global_num_experts=EXPERTS, ep_rank=0)
        module.w13_lora_a_stacked = [torch.empty(1, EXPERTS)]
        if family == "gpt_oss":
            manager._stack_moe_lora_weights(home, model, module, name)
            up, down = (b @ a for a, b in zip(model.loras[name].lora_a, model.loras[name].lora_b, strict=True))
        else:
            manager._convert_3d_to_2d_moe_lora(home, model, module, name)
            w1, down, w3 = (b @ a for a, b in zip(model.loras[name].lora_a, model.loras[name].lora_b, strict=True))
            up = torch.cat([w1, w3], dim=1)
    expected = _products(fused, name)
    assert torch.equal(up, expected[0])
    assert torch.equal(down, expected[1])


@WITH["sglang"]
@pytest.mark.parametrize("family", PER_EXPERT)
def test_sglang_reads_keys_for_each_expert(family: str, tmp_path: Path) -> None:
    fused, each = _written(family, tmp_path)
    assert each is not None
    home = "block_sparse_moe" if family == "mixtral" else "mlp"
    with readers("sglang") as (lora, *_):
        lora.get_layer_id = lambda name: int(name.partition("layers.")[2].partition(".")[0])
        layers = [SimpleNamespace(weights={}) for _ in range(4)]
        config = SimpleNamespace(target_modules=["q_proj", "k_proj", "v_proj", "gate_proj"], r=RANK)
        adapter: Any = SimpleNamespace(layers=layers, config=config, base_hf_config=SimpleNamespace(architectures=[]))
        for method in [name for name in vars(lora.LoRAAdapter) if "normalize" in name or name.startswith("_")]:
            value = getattr(lora.LoRAAdapter, method)
            if callable(value) and not method.startswith("__"):
                setattr(adapter, method, value.__get__(adapter) if "build" not in method else value)
        adapter._moe_is_gated_by_layer = {}
        for name, tensor in load_file(each / "adapter_model.safetensors").items():
            lora.LoRAAdapter._process_weight(adapter, name, tensor)
        lora.LoRAAdapter._normalize_weights(adapter)
        number = next(n for n, layer in enumerate(layers) if any(".experts.0." in name for name in layer.weights))
        weights = layers[number].weights
        prefix = f"base_model.model.model.layers.{number}.{home}.experts"
        for expert, (up, down) in enumerate(zip(*_products(fused, f"model.layers.{number}.mlp.experts"), strict=True)):
            a = weights[f"{prefix}.{expert}.gate_up_proj.lora_A.weight"]
            b = weights[f"{prefix}.{expert}.gate_up_proj.lora_B.weight"]
            half = len(b) // 2
            assert torch.equal(b[:half] @ a[:RANK], up[:half])
            assert torch.equal(b[half:] @ a[RANK:], up[half:])
            b, a = (weights[f"{prefix}.{expert}.down_proj.lora_{x}.weight"] for x in "BA")
            assert torch.equal(b @ a, down)
