"""Steps on fake CUDA tensors: everything on the device, nothing copied, waits and collectives as many as planned."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

LAYERS, MICRO_BATCHES = 2, 2
LORA = {"r": 8, "dropout": 0.1}
BY_LAYER = {"accumulate": "by_layer"}
# The family, the layout on 8 ranks and its mode; then, of each expert layer and micro-batch, waits and all-to-alls.
VARIANTS: dict[str, tuple[dict[str, Any], int, int]] = {
    "all experts here": ({"parallel": {"ep": 1}}, 0, 0),
    "ep": ({"parallel": {"ep": 8}}, 1, 7),
    "ep, selective": ({"parallel": {"ep": 2}, "mode": "selective"}, 1, 7),
    "ep, full": ({"parallel": {"ep": 4}, "mode": "full"}, 1, 9),
    "adapters with dropout, replicas": (
        {"parallel": {"ep": 4, "replicate": 2}, "lora": LORA, "mode": "full"}, 1, 11,
    ),
    "tp": ({"parallel": {"ep": 2, "tp": 2}, "mode": "selective"}, 1, 7),
    "cp": ({"parallel": {"ep": 2, "cp": 2}, "mode": "none"}, 1, 11),
    # Half of the layers are here.
    "pp": ({"parallel": {"ep": 2, "pp": 2}, "mode": "none"}, 1, 7),
    # A first run of the model counts, for losses of the whole batch.
    "packed, router losses": ({"parallel": {"ep": 2}, "packed": True, "moe": {"aux_loss_coef": 0.01}}, 2, 11),
    "samples in one row": ({"parallel": {"ep": 2}, "samples": True, "mode": "selective"}, 1, 7),
    "samples in one row, cp": ({"parallel": {"ep": 2, "cp": 2}, "samples": True, "mode": "full"}, 1, 15),
    "shared experts, balancing": (
        {"family": "deepseek_v3", "parallel": {"ep": 2}, "moe": {"bias_update_rate": 1e-3}}, 1, 7,
    ),
    "shared experts, tp": ({"family": "deepseek_v3", "parallel": {"ep": 4, "tp": 2}, "mode": "selective"}, 1, 7),
    "triton": ({"family": "gpt_oss", "parallel": {"ep": 2}, "mode": "full", "triton": True}, 1, 9),
    "by DeepEP": ({"family": "deepseek_v3", "parallel": {"ep": 8}, "moe": {"dispatch": "deepep"}}, 1, 0),
    "by DeepEP, full, adapters with dropout": (
        {"parallel": {"ep": 4}, "lora": LORA, "mode": "full", "moe": {"dispatch": "deepep"}}, 1, 0,
    ),
    "by layer, samples in one row": (
        {"parallel": {"ep": 2}, "layers": 4, "samples": True, "mode": "full", "order": BY_LAYER}, 1, 9,
    ),
    "by layer, adapters with dropout": (
        {"parallel": {"ep": 4}, "layers": 4, "lora": LORA, "mode": "full", "order": BY_LAYER}, 1, 11,
    ),
    "by layer, inputs on the host": (
        {"parallel": {"ep": 2}, "layers": 4, "mode": "full", "order": {**BY_LAYER, "keep_inputs": "host"}}, 1, 9,
    ),
    "by layer, router losses": (
        {"parallel": {"ep": 2}, "moe": {"aux_loss_coef": 0.01}, "order": BY_LAYER}, 1, 7,
    ),
    "biases, adapters": ({"family": "gpt_oss", "parallel": {"ep": 2}, "lora": LORA}, 1, 8),
}  # fmt: skip
# Which micro-batch a stage runs is told in a tensor on the host.
OF_PIPELINES = {"aten::arange", "aten::zeros", "aten::slice", "prim::device"}
# Each input that waits on the host has a pinned buffer there.
OF_INPUTS = {"aten::empty", "prim::device"}
# Where samples end is made on the host.
OF_SAMPLES = {"aten::lift_fresh", "prim::device"}


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What a step of each variant did."""
    here, library = Path(__file__).parent, tmp_path_factory.mktemp("library") / "no_cuda.so"
    parts = Path(torch.__file__).parent
    include = [f"-I{parts}/include", f"-I{parts}/include/torch/csrc/api/include"]
    link = [f"-L{parts}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{parts}/lib"]
    command = [str(COMPILER), "-std=c++20", "-shared", "-fPIC", *include, str(here / "no_cuda.cpp"), *link]
    subprocess.run([*command, "-o", str(library)], check=True)
    variants = [{"family": "qwen3_moe", "world": 8, **variant} for variant, *_ in VARIANTS.values()]
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation.fake_cuda", str(library)],
        input="\n".join(json.dumps(variant) for variant in variants),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(VARIANTS, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.slow(why="one process of 30 s for all")
@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_stays_on_the_device_and_waits_once_a_layer(name: str, steps: dict[str, dict[str, Any]]) -> None:
    (variant, waits, all_to_alls), step = VARIANTS[name], steps[name]
    assert step["elsewhere"] == []
    assert step["results"] == ["cuda"]
    # Where samples end is copied once a micro-batch, and every layer attends by it, without a mask.
    samples, layers = "samples" in variant, variant.get("layers", LAYERS)
    # An input goes to the host and comes back, but in the first layer, which has none, and the last.
    on_host = "keep_inputs" in variant.get("order", {})
    there_and_back = 2 * (layers - 2) * MICRO_BATCHES * on_host
    copies = {"aten::_to_copy": MICRO_BATCHES * samples, "aten::copy_": there_and_back}
    assert step["copies"] == {name: count for name, count in copies.items() if count}
    assert bool(step["by_samples"]) is samples
    assert step["by_samples"] in (0, layers * MICRO_BATCHES * (2 if variant.get("mode") == "full" else 1))
    of_variant = {"pp" in variant["parallel"]: OF_PIPELINES, samples: OF_SAMPLES, on_host: OF_INPUTS}
    allowed = of_variant.get(True, set())
    assert step["on_host"].keys() <= allowed
    assert [kind for kind in step["collectives"] if not kind.endswith(" on cuda")] == []
    # The first layer of DeepSeek-V3 is dense.
    calls = (layers - (variant.get("family") == "deepseek_v3")) * MICRO_BATCHES // variant["parallel"].get("pp", 1)
    assert step["waits_of_experts"] == waits * calls
    assert step["collectives"].get("alltoall_base_ on cuda", 0) == all_to_alls * calls
