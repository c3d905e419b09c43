"""What a rank reads from the disk, to the byte: its own experts, and of everything else its share."""

import os
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import PreTrainedModel

from expertmesh.config import ParallelConfig, PrecisionConfig
from expertmesh.distributed.mesh import init_mesh
from expertmesh.io.boxes import Box
from expertmesh.io.safetensors_reader import FileTensor, WeightFiles, open_weight_files
from expertmesh.model import ModelOptions, prepare_model
from expertmesh.parallel.shard_plan import ShardOptions
from expertmesh.state.model_view import ModelView
from expertmesh.weights.load import bytes_to_read, fill, fill_planned
from expertmesh.weights.mapping import plan_load
from expertmesh.weights.meta_model import materialize, read_model_config
from tests.support.ranks import shared_ranks
from tests.weights.published import FORMATS, SIZES, is_linear, quantise
from tests.weights.tiny import qwen3_moe, random_model, write_fused

WORLD, EXPERTS = 8, 64
LAYOUTS = ("one file", "sharded", "fused")


def _write(model: PreTrainedModel, directory: Path, layout: str) -> int:
    """Write the checkpoint; return the bytes of all routed experts in it."""
    if layout == "fused":
        write_fused(model, directory)
    else:
        model.save_pretrained(directory, max_shard_size="20KB" if layout == "sharded" else "1GB")
    with open_weight_files(directory) as files:
        experts = [tensor for name, tensor in files.tensors.items() if ".experts." in name]
        assert len(experts) == (2 if layout == "fused" else 3 * EXPERTS)
        return sum(tensor.nbytes for tensor in experts)


def _read(directory: Path) -> tuple[int, int, int, int]:
    """Bytes of experts and of everything that this rank reads; what it holds, and what was announced."""
    read, experts = WeightFiles.read, 0

    def counted(self: WeightFiles, tensor: FileTensor, box: Box, out: torch.Tensor) -> None:
        nonlocal experts
        before = self.bytes_read
        read(self, tensor, box, out)
        experts += self.bytes_read - before if ".experts." in tensor.name else 0

    WeightFiles.read = counted  # type: ignore[method-assign]
    mesh = init_mesh(ParallelConfig(ep=WORLD), device=torch.device("cpu"))
    config, _ = read_model_config(str(directory))
    precision = PrecisionConfig(params="float32", compute="float32", reduce="float32")
    model, _ = prepare_model(config, directory, mesh, ModelOptions(precision), ShardOptions(precision))
    announced = bytes_to_read(model, directory)
    report = fill(model, directory, allocate_on="cpu")
    return experts, report.bytes_read, report.local_bytes, announced


@pytest.mark.slow_cases(r"one file", why="fused and sharded files stay")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_of_64_experts_on_8_expert_parallel_ranks_reads_exactly_one_eighth_each(
    layout: str, tmp_path: Path
) -> None:
    config = qwen3_moe(num_experts=EXPERTS, num_hidden_layers=1, vocab_size=64, moe_intermediate_size=8)
    all_experts = _write(random_model(config), tmp_path / "model", layout)
    assert (tmp_path / "model" / "model.safetensors.index.json").exists() == (layout == "sharded")
    assert all_experts == EXPERTS * 3 * 32 * 8 * 4
    for experts, total, held, announced in shared_ranks(_read, WORLD, tmp_path / "model"):
        assert experts * WORLD == all_experts
        assert total == held == announced


Span = tuple[str, int, int]


def _spans(directory: Path) -> tuple[list[Span], list[Span]]:
    """What this rank of a node announces and reads: file, first byte, last + 1."""
    told: list[Span] = []
    asked: list[Span] = []
    advise, read = os.posix_fadvise, os.preadv

    def counted_advice(descriptor: int, offset: int, length: int, advice: int) -> None:
        told.append((os.readlink(f"/proc/self/fd/{descriptor}"), offset, offset + length))
        advise(descriptor, offset, length, advice)

    def counted(descriptor: int, buffers: Any, offset: int) -> int:
        got = read(descriptor, buffers, offset)
        asked.append((os.readlink(f"/proc/self/fd/{descriptor}"), offset, offset + got))
        return got

    mesh = init_mesh(ParallelConfig(ep=2), device=torch.device("cpu"))
    config, _ = read_model_config(str(directory))
    precision = PrecisionConfig(params="float32", compute="float32", reduce="float32")
    model, _ = prepare_model(config, directory, mesh, ModelOptions(precision), ShardOptions(precision))
    with open_weight_files(directory) as files:
        plan = plan_load(ModelView(model), files)
        materialize(model, "cpu")
        with mock.patch.object(os, "posix_fadvise", counted_advice), mock.patch.object(os, "preadv", counted):
            fill_planned(ModelView(model), files, plan)
    return told, asked


@pytest.mark.slow_cases(r"one file", why="fused and sharded files stay")
@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no advice on what will be read")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_node_reads_the_checkpoint_once_file_by_file_and_the_system_is_told_before(
    layout: str, tmp_path: Path
) -> None:
    config = qwen3_moe(num_experts=EXPERTS, num_hidden_layers=1, vocab_size=64, moe_intermediate_size=8)
    _write(random_model(config), tmp_path / "model", layout)
    with open_weight_files(tmp_path / "model") as files:
        total, count = files.total_bytes, len({tensor.path for tensor in files.tensors.values()})
    ranks = shared_ranks(_spans, 2, tmp_path / "model")
    for told, asked in ranks:
        assert sorted(set(told)) == sorted(set(asked))
        order = [file for file, *_ in asked]
        assert len(list(groupby(order))) == len(set(order)) == count
    both = sorted(span for _, asked in ranks for span in asked)
    assert sum(end - start for _, start, end in both) == total
    assert all(one[0] != other[0] or one[2] <= other[1] for one, other in pairwise(both))


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no advice on what will be read")
def test_the_system_is_told_of_codes_and_scales_before_they_are_read(tmp_path: Path) -> None:
    random_model(qwen3_moe(num_hidden_layers=1, **SIZES)).save_pretrained(tmp_path / "model")
    target = quantise(tmp_path / "model", tmp_path, FORMATS["fp8 blocks"](), is_linear) / "quantised"
    for told, asked in shared_ranks(_spans, 2, target):
        assert set(told) == set(asked)
