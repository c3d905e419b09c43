"""Loading: every rank's shards equal the file's bytes, each rank reads only its own, and errors reach all ranks."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedConfig, PreTrainedModel

from expertmesh.config.errors import IntegrityError
from expertmesh.io.boxes import Piece, full_box
from expertmesh.io.safetensors_reader import WeightFiles, open_weight_files
from expertmesh.state.model_view import ModelView
from expertmesh.state.shards import local_tensor
from expertmesh.weights import load
from expertmesh.weights.lazy import LazyTensor
from expertmesh.weights.load import LoadReport, bytes_to_read, fill, fill_planned
from expertmesh.weights.mapping import plan_load
from expertmesh.weights.meta_model import build_meta_model, materialize
from tests.support.ranks import RankFailed, shared_ranks
from tests.weights.tiny import FAMILIES, full_state, qwen3_moe, random_model, shard_for_test, write_fused

LAYOUTS = ((1, 1, 0), (2, 1, 0), (2, 2, 0), (4, 2, 0), (4, 2, 1), (4, 4, 0))
State = dict[str, torch.Tensor]


def _prepared(
    config: PreTrainedConfig, world: int, ep: int, efsdp_dim: int = 0, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    model = build_meta_model(config, dtype)
    if world > 1:
        shard_for_test(model, world, ep, efsdp_dim)
    return model


def _load_all(
    config: PreTrainedConfig, directories: list[Path], world: int, ep: int, efsdp_dim: int
) -> list[tuple[LoadReport, int, State | None]]:
    """Load each directory into a fresh model; rank 0 also returns the whole state."""
    results = []
    for directory in directories:
        model = _prepared(config, world, ep, efsdp_dim)
        planned = bytes_to_read(model, directory)
        materialize(model, "cpu")
        report = fill(model, directory)
        state = full_state(model)
        is_first = world == 1 or dist.get_rank() == 0
        results.append((report, planned, state if is_first else None))
    return results


def _differences(state: State, expected: State) -> list[str]:
    assert state.keys() == expected.keys()
    return [name for name in expected if not torch.equal(state[name], expected[name])]


@pytest.mark.slow_cases(
    r"((2-2-0|4-2-0|1-1-0)-.*|2-1-0-(mixtral|deepseek_v3)|4-2-1-(qwen3_moe|mixtral)|4-4-0-.*)",
    why="pairwise; four ranks in two EP groups stay, whose experts are cut again, and two without",
)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("world", "ep", "efsdp_dim"), LAYOUTS)
def test_shards_equal_the_files_bit_for_bit_and_ranks_read_only_their_own(
    family: str, world: int, ep: int, efsdp_dim: int, tmp_path: Path
) -> None:
    reference = random_model(FAMILIES[family]())
    directories = [tmp_path / name for name in ("single", "sharded", "fused")]
    reference.save_pretrained(directories[0])
    reference.save_pretrained(directories[1], max_shard_size="20KB")
    assert (directories[1] / "model.safetensors.index.json").exists()
    write_fused(reference, directories[2])
    job = (reference.config, directories, world, ep, efsdp_dim)
    ranks = shared_ranks(_load_all, world, *job) if world > 1 else [_load_all(*job)]
    for results in ranks:
        for report, planned, state in results:
            assert report.bytes_read == planned
            assert report.local_bytes <= report.bytes_read <= report.local_bytes * 1.01
            if state is not None:
                assert _differences(state, reference.state_dict()) == []


@pytest.mark.slow_cases(r"torch\.float32-.*", why="the wider dtype stays")
@pytest.mark.parametrize(
    ("stored", "wanted"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str
)
def test_weights_are_cast_to_the_parameters_dtype(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    reference = random_model(qwen3_moe(), dtype=stored)
    reference.save_pretrained(tmp_path)
    model = _prepared(reference.config, 1, 1, dtype=wanted)
    materialize(model, "cpu")
    report = fill(model, tmp_path)
    expected = {name: tensor.to(wanted) for name, tensor in reference.state_dict().items()}
    assert _differences(full_state(model), expected) == []
    assert report.bytes_read * wanted.itemsize == report.local_bytes * stored.itemsize


def _swap_two_experts(config: PreTrainedConfig, directory: Path) -> State:
    """The planted bug: the plan takes expert 0 for expert 1 and back."""
    model = _prepared(config, 2, 2)
    materialize(model, "cpu")
    name = "model.layers.0.mlp.experts.down_proj"
    with open_weight_files(directory) as files:
        plan = plan_load(ModelView(model), files)
        whole = plan.tensors[name]
        first, second, *rest = whole.pieces
        swapped = [
            Piece(first.dest, second.leaf, second.source, first.dims),
            Piece(second.dest, first.leaf, first.source, second.dims),
        ]
        plan.tensors[name] = LazyTensor(whole.shape, whole.dtype, [*swapped, *rest])
        fill_planned(ModelView(model), files, plan)
    return full_state(model)


def _rank_0s_shards_everywhere(config: PreTrainedConfig, directory: Path) -> State:
    """The planted bug: every rank loads what rank 0 should."""

    def of_rank_0(tensor: torch.Tensor) -> Any:
        local = local_tensor(tensor)
        return [(full_box(local.shape), local)]

    load.held_parts = of_rank_0
    model = _prepared(config, 2, 2)
    materialize(model, "cpu")
    fill(model, directory)
    return full_state(model)


def test_planted_bugs_turn_the_comparison_red(tmp_path: Path) -> None:
    reference = random_model(qwen3_moe())
    reference.save_pretrained(tmp_path)
    swapped, _ = shared_ranks(_swap_two_experts, 2, reference.config, tmp_path)
    assert _differences(swapped, reference.state_dict()) == ["model.layers.0.mlp.experts.down_proj"]
    copied, _ = shared_ranks(_rank_0s_shards_everywhere, 2, reference.config, tmp_path)
    assert set(_differences(copied, reference.state_dict())) == set(reference.state_dict())


def _fill_and_report_error(config: PreTrainedConfig, directory: Path, broken_rank: int | None) -> str:
    model = _prepared(config, 2, 2)
    materialize(model, "cpu")
    path, real = directory / "model.safetensors", WeightFiles.read

    def shrunk(self: WeightFiles, tensor: Any, box: Any, out: torch.Tensor) -> None:
        if tensor.name.endswith("norm.weight") and dist.get_rank() == broken_rank:
            raise IntegrityError(f"{path}: damaged: the file ends inside tensor {tensor.name}")
        real(self, tensor, box, out)

    with pytest.raises(IntegrityError) as caught, mock.patch.object(WeightFiles, "read", shrunk):
        fill(model, directory)
    dist.barrier()  # The group still works: nobody was left inside a collective.
    return str(caught.value)


def test_a_read_error_on_one_rank_is_the_same_error_on_all(tmp_path: Path) -> None:
    reference = random_model(qwen3_moe())
    reference.save_pretrained(tmp_path)
    first, second = shared_ranks(_fill_and_report_error, 2, reference.config, tmp_path, 1)
    assert first == second
    assert "ends inside tensor model.layers.0" in first


def test_a_plan_error_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    reference = random_model(qwen3_moe())
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    first, second = shared_ranks(_fill_and_report_error, 2, reference.config, tmp_path, None)
    assert first == second
    assert "1 missing (model.norm.weight)" in first


NORM, EXPERT = "model.norm.weight", "model.layers.1.mlp.experts.3"
UNFIT: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "missing": ({NORM: None}, f"1 missing ({NORM})"),
    "unexpected": ({"model.what.weight": torch.ones(2)}, "1 unexpected (model.what.weight)"),
    "duplicated": ({"norm.weight": torch.ones(32)}, f"1 duplicated ({NORM} from"),
    "misshaped": ({NORM: torch.ones(31)}, f"1 misshaped ({NORM}: files (31,), model (32,))"),
    "integers": ({NORM: torch.ones(32).int()}, f"1 mistyped ({NORM}: {NORM} is torch.int32, the model torch.float32)"),
    "booleans": ({NORM: torch.ones(32).bool()}, f"1 mistyped ({NORM}: {NORM} is torch.bool, the model torch.float32)"),
    "an expert of integers": (
        {f"{EXPERT}.down_proj.weight": torch.ones(32, 24, dtype=torch.uint8)},
        f"1 mistyped (model.layers.1.mlp.experts.down_proj: {EXPERT}.down_proj.weight is torch.uint8, the model",
    ),
    "8-bit floats without scales": (
        {NORM: torch.ones(32).to(torch.float8_e4m3fn)},
        f"1 mistyped ({NORM}: {NORM} is torch.float8_e4m3fn, the model torch.float32)",
    ),
    "a matrix of an expert missing": ({f"{EXPERT}.up_proj.weight": None}, "model.layers.1.mlp.experts.gate_up_proj"),
}


def _errors(config: PreTrainedConfig, directories: list[Path]) -> list[str]:
    return [_fill_and_report_error(config, directory, None) for directory in directories]


def test_files_that_do_not_fit_are_one_sentence_on_every_rank_naming_the_tensor(tmp_path: Path) -> None:
    reference = random_model(qwen3_moe())
    directories = [tmp_path / name for name in UNFIT]
    for directory, (edits, _) in zip(directories, UNFIT.values(), strict=True):
        reference.save_pretrained(directory)
        tensors = load_file(directory / "model.safetensors")
        for name, tensor in edits.items():
            tensors.pop(name, None)
            tensors |= {} if tensor is None else {name: tensor}
        save_file(tensors, directory / "model.safetensors")
    first, second = shared_ranks(_errors, 2, reference.config, directories)
    assert first == second
    for directory, error, (_, words) in zip(directories, first, UNFIT.values(), strict=True):
        assert error.startswith(f"{directory}: does not fit Qwen3MoeForCausalLM: ")
        assert words in error


@pytest.mark.slow_cases(r"-?inf", why="NaN stays")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused_naming_file_tensor_and_place(value: float, tmp_path: Path) -> None:
    reference = random_model(qwen3_moe())
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name][3, 4] = value
    save_file(tensors, tmp_path / "model.safetensors")
    first, second = shared_ranks(_fill_and_report_error, 2, reference.config, tmp_path, None)
    assert first == second
    assert f"{tmp_path / 'model.safetensors'}: tensor {name} holds a value that is not finite" in first
    # Expert 5, row 24 (gate) + 3, column 4 of the fused parameter.
    assert "parameter model.layers.1.mlp.experts.gate_up_proj at [5, 27, 4]" in first


def test_large_finite_values_whose_sum_overflows_are_accepted(tmp_path: Path) -> None:
    reference = random_model(qwen3_moe())
    torch.nn.init.constant_(reference.lm_head.weight, torch.finfo(torch.float32).max / 2)
    reference.save_pretrained(tmp_path)
    model = _prepared(reference.config, 1, 1)
    materialize(model, "cpu")
    fill(model, tmp_path)
    assert torch.equal(model.lm_head.weight, reference.lm_head.weight)


def _fill_on_meta(config: PreTrainedConfig, directory: Path) -> None:
    fill(_prepared(config, 2, 2), directory)


def test_a_model_without_memory_is_a_mistake_of_the_caller(tmp_path: Path) -> None:
    reference = random_model(qwen3_moe())
    reference.save_pretrained(tmp_path)
    with pytest.raises(RankFailed, match="still on meta"):
        shared_ranks(_fill_on_meta, 2, reference.config, tmp_path)


def _logits(config: PreTrainedConfig, directory: Path) -> torch.Tensor:
    """Of a model under plain FSDP2: what it gathers for computing is what was filled in."""
    model = build_meta_model(config, torch.float32)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    materialize(model, "cpu")
    fill(model, directory)
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(torch.arange(12)[None]).logits
    return logits


@pytest.mark.slow_cases(r"False", why="tied weights stay")
@pytest.mark.parametrize("tied", [False, True])
def test_a_filled_sharded_model_computes_what_the_reference_computes(tied: bool, tmp_path: Path) -> None:
    # Nothing here divides by 3: shards are uneven, and FSDP2 pads them.
    reference = random_model(qwen3_moe(tie_word_embeddings=tied))
    reference.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = reference(torch.arange(12)[None]).logits
    for logits in shared_ranks(_logits, 3, reference.config, tmp_path):
        assert torch.equal(logits, expected)


def test_tied_weights_are_read_once(tmp_path: Path) -> None:
    reference = random_model(qwen3_moe(tie_word_embeddings=True))
    reference.save_pretrained(tmp_path)
    for results in shared_ranks(_load_all, 2, reference.config, [tmp_path], 2, 2, 0):
        report, _, state = results[0]
        assert report.bytes_read <= report.local_bytes * 1.01
        assert state is None or _differences(state, reference.state_dict()) == []
