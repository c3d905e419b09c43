"""The format page is true: its reader reads checkpoints, PyTorch's own does, and the golden one stays readable."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM

import expertmesh as em
from expertmesh.anatomy import describe
from expertmesh.checkpoint.manifest import SCHEMA_VERSION, FileEntry, Manifest, TensorEntry, Tiling, read_manifest
from expertmesh.checkpoint.state import fingerprint
from expertmesh.config.errors import InputError, IntegrityError
from expertmesh.experts.placement import Placement, write_placement
from expertmesh.export.checkpoint import export
from expertmesh.verification.checkpoint import verify
from tests.checkpoint.damage import change_manifest, flip_a_bit
from tests.checkpoint.make_golden import GOLDEN, STEP, golden_job, sha256
from tests.checkpoint.tiny import save
from tests.support.models import tiny_model
from tests.support.ranks import shared_ranks

PAGE = Path(__file__).parents[2] / "docs" / "checkpoint-format.md"
CHECKPOINT = GOLDEN / f"step-{STEP:08d}"


def _hashes() -> dict[str, str]:
    hashes: dict[str, str] = json.loads((GOLDEN / "tensors.json").read_text())
    return hashes


def _reader() -> Any:
    """`read_checkpoint` as it stands on the page."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    (code,) = [block for block in blocks if "def read_checkpoint" in block]
    names: dict[str, Any] = {}
    exec(code, names)
    assert not any("expertmesh" in line for line in code.splitlines() if "import" in line)
    return names["read_checkpoint"]


def test_the_reader_on_the_page_reads_the_golden_checkpoint(tmp_path: Path) -> None:
    manifest, tensors = _reader()(CHECKPOINT)
    assert manifest["step"] == STEP
    assert {name: sha256(tensor) for name, tensor in tensors.items()} == _hashes()
    damaged = shutil.copytree(CHECKPOINT, tmp_path / CHECKPOINT.name)
    flip_a_bit("model-00001-of-00002.safetensors", 0.9)(damaged)
    with pytest.raises(AssertionError, match="model-00001"):
        _reader()(damaged)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Of every axis there is: replicas, and experts cut over ep and efsdp."""
    directory = tmp_path_factory.mktemp("checkpoints")
    states = shared_ranks(save, 8, "mixtral", em.ParallelConfig(ep=2, replicate=2), 2, directory)
    return directory / "step-00000002", states[0]


def test_the_reader_on_the_page_reads_what_is_written_today(
    written: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    layers = {spec.name: (1, 3, 4, 7, 0, 2, 5, 6) for spec in describe(tiny_model("mixtral")).experts}
    write_placement(Placement(2, layers), tmp_path / "placement.json")
    placed = em.MoeConfig(placement=str(tmp_path / "placement.json"))
    states = shared_ranks(save, 2, "mixtral", em.ParallelConfig(ep=2), 1, tmp_path, placed)
    for path, state in (written, (tmp_path / "step-00000001", states[0])):
        _, tensors = _reader()(path)
        assert tensors.keys() == state.keys()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in state.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_pytorch_s_own_reader_reads_it(written: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, state = written
    loaded = {name: torch.full_like(tensor, 7) for name, tensor in state.items()}
    dcp.load(loaded, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


def test_the_page_names_every_file_and_every_key(written: tuple[Path, dict[str, torch.Tensor]]) -> None:
    page = PAGE.read_text()
    assert f"# The checkpoint format, schema version {SCHEMA_VERSION}" in page
    for model in (Manifest, FileEntry, TensorEntry, Tiling):
        for key in model.model_fields:
            assert f"`{key}`" in page or f'"{key}"' in page, key
    named = set(re.findall(r"^\| `([^`]+)` \|", page, re.M))
    for path in written[0].iterdir():
        general = re.sub(r"\d{5}-of-\d{5}", "RRRRR-of-WWWWW", path.name)
        assert general + ("/" if path.is_dir() else "") in named, path.name
    for key in (
        "saved_offsets",
        "DCP_SHARDING_INFO",
        "DCP_VERSION",
        "EXPERT_ORDERS",
        "fingerprints",
        "left_out",
        "tensors",
        "step",
        "state",
        "offset",
    ):
        assert key in page, key


@pytest.mark.parametrize("size", [1, 4, 6, 4001])
def test_the_fingerprint_is_what_the_page_says(size: int) -> None:
    data = torch.randint(256, (size,), generator=torch.Generator().manual_seed(size)).to(torch.uint8)
    content, even = bytes(data.tolist()), size // 4 * 4
    groups = (int.from_bytes(content[i : i + 4], "little", signed=True) * (2 * (i // 4) + 1) for i in range(0, even, 4))
    total = sum(groups) + sum(content[b] * (2 * b + 1) for b in range(even, size))
    assert fingerprint(data) == (total + (1 << 63)) % (1 << 64) - (1 << 63)


def _load_golden(parallel: em.ParallelConfig) -> tuple[dict[str, str], dict[str, Any], list[float]]:
    job = golden_job(parallel, seed=9)
    loaded = em.load_checkpoint(job.model, job.optimizer, GOLDEN)
    hashes = {name: sha256(tensor) for name, tensor in job.state().items()}
    job.train([STEP])
    return hashes, loaded.state, [float(p.abs().sum()) for p in job.state().values()]


@pytest.mark.slow_cases(r"2-2-1", why="four ranks with replicas stay")
@pytest.mark.slow_cases(r"4-4-1", why="two groups of ep 2 on four ranks stay")
@pytest.mark.parametrize(("world", "ep", "replicate"), [(1, 1, 1), (2, 2, 1), (4, 4, 1), (4, 2, 2)])
def test_the_golden_checkpoint_is_read_into_any_layout(world: int, ep: int, replicate: int) -> None:
    parallel = em.ParallelConfig(ep=ep, replicate=replicate)
    for hashes, state, sums in shared_ranks(_load_golden, world, parallel):
        assert hashes == _hashes()
        assert state == {"rows": 16}
        assert all(value < float("inf") for value in sums)


def test_the_golden_checkpoint_is_sound_and_exported(tmp_path: Path) -> None:
    path, expected = CHECKPOINT, _hashes()
    verified = verify(path)
    assert verified.findings == ()
    assert verified.replicated > 0
    assert [len(experts.sha256) for experts in verified.experts] == [4]
    export(path, tmp_path / "model")
    model, notes = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(notes.values()), notes
    state = model.state_dict()
    assert {name: sha256(tensor) for name, tensor in state.items()} == {name: expected[name] for name in state}
    assert len(state) == len(read_manifest(path).model)


def test_a_world_size_that_is_no_world_s_costs_nothing(tmp_path: Path) -> None:
    path = shutil.copytree(CHECKPOINT, tmp_path / CHECKPOINT.name)
    change_manifest(lambda m: m.update(world_size=10**1000))(path)
    with pytest.raises(IntegrityError, match=r"world_size|model-00000-of-"):
        read_manifest(path)


def test_a_tiling_that_no_tensor_has_is_looked_at_too(tmp_path: Path) -> None:
    path = shutil.copytree(CHECKPOINT, tmp_path / CHECKPOINT.name)
    change_manifest(lambda m: m["tilings"].append({"cuts": [[0]], "ranks": [0]}))(path)
    with pytest.raises(IntegrityError, match=r"tiling \d+: it has 0 parts, but names the ranks of 1"):
        read_manifest(path)
    assert len(verify(path).findings) == 1


def test_a_file_name_that_no_file_can_have_is_found(tmp_path: Path) -> None:
    path = shutil.copytree(CHECKPOINT, tmp_path / CHECKPOINT.name)
    name = f"model-{'0' * 5000}-of-00002.safetensors"
    change_manifest(lambda m: m["files"].append({"name": name, "bytes": 1, "sha256": "0" * 64}))(path)
    assert any("missing, but the checkpoint's manifest names it" in each.text for each in verify(path).findings)


def _refusals(path: Path) -> list[str]:
    job = golden_job(em.ParallelConfig(ep=1))
    with pytest.raises(InputError) as caught:
        em.load_checkpoint(job.model, job.optimizer, path)
    return [str(caught.value)]


def test_a_newer_schema_is_refused_by_number_whatever_else_it_holds(tmp_path: Path) -> None:
    newer = shutil.copytree(CHECKPOINT, tmp_path / CHECKPOINT.name)
    change_manifest(lambda m: m.update(schema_version=SCHEMA_VERSION + 1, model=[], more={"a": 1}))(newer)
    said = shared_ranks(_refusals, 1, newer)[0]
    for reader in (verify, lambda path: export(path, tmp_path / "model")):
        with pytest.raises(InputError) as caught:
            reader(newer)
        said.append(str(caught.value))
    assert all("schema version 3, newer than the 2 that this version of expertmesh reads" in text for text in said)
    assert not (tmp_path / "model").exists()
