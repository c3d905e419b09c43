"""An exported checkpoint is, byte for byte, what saving the live model writes; a damaged one is refused before that."""

import errno
import os
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import expertmesh as em
from expertmesh.config.errors import IntegrityError, SecurityError
from expertmesh.export.checkpoint import export
from expertmesh.io import directory as directory_module
from expertmesh.io import safetensors_writer
from expertmesh.io.safetensors_reader import WeightFiles, open_weight_files
from expertmesh.weights import lazy, write
from tests.checkpoint.damage import flip_a_bit, replace_file
from tests.checkpoint.forge import forge_json
from tests.checkpoint.tiny import Job
from tests.data.tokenizers_on_the_fly import CHATML, bpe_tokenizer
from tests.families import tiny as families
from tests.support.errors import refused
from tests.support.list_models import write_list_model
from tests.support.models import tiny_model
from tests.support.ranks import shared_ranks
from tests.weights.test_unmapped import MTP, source_with_mtp
from tests.weights.tiny import mixtral, random_model, write_fused

STEP = "step-00000002"
FP32 = em.PrecisionConfig(params="float32", compute="float32", reduce="float32")


def _write_all(model: Any, optimizer: Any, root: Path) -> None:
    """A checkpoint, and what saving the live model gives in two dtypes and in one file or several."""
    tokenizer = bpe_tokenizer(CHATML)
    em.save_checkpoint(model, optimizer, root / "checkpoints", step=2, tokenizer=tokenizer)
    em.save_model(model, root / "live", tokenizer=tokenizer)
    em.save_model(model, root / "live16", tokenizer=tokenizer, dtype=torch.bfloat16, max_shard_bytes=30_000)


def _train_and_write(family: str, parallel: em.ParallelConfig, root: Path) -> None:
    job = Job(tiny_model(family), parallel)
    job.train(range(2))
    _write_all(job.model, job.optimizer, root)


def _load_and_write(source: Path, ep: int, root: Path, trust: bool) -> None:
    mesh = em.init_mesh(em.ParallelConfig(ep=ep), num_experts=8)
    model = em.load_model(source, mesh, precision=FP32, trust_remote_code=trust)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    _write_all(model, None, root)


def _same_files(one: Path, other: Path) -> None:
    names = [sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()) for root in (one, other)]
    assert names[0] == names[1]
    for name in names[0]:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def _check_exports(root: Path, **options: Any) -> None:
    path = root / "checkpoints" / STEP
    export(path, root / "exported", **options)
    _same_files(root / "live", root / "exported")
    _, report = export(path, root / "exported16", dtype=torch.bfloat16, max_shard_bytes=30_000, **options)
    assert len(report.files) > 2
    _same_files(root / "live16", root / "exported16")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek-V3 on four ranks, experts over two, everything twice."""
    root = tmp_path_factory.mktemp("run")
    shared_ranks(_train_and_write, 4, "deepseek_v3", em.ParallelConfig(ep=2, replicate=2), root)
    return root


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    """A checkpoint to spoil; nothing else is in `tmp_path`."""
    return shutil.copytree(run / "checkpoints" / STEP, tmp_path / STEP)


def test_what_is_exported_is_what_saving_the_live_model_writes(run: Path) -> None:
    _check_exports(run)
    model, notes = AutoModelForCausalLM.from_pretrained(run / "exported", output_loading_info=True)
    assert not any(notes.values()), notes
    assert model.dtype == torch.float32
    assert AutoTokenizer.from_pretrained(run / "exported").chat_template == CHATML
    stock = AutoModelForCausalLM.from_pretrained(run / "exported16", dtype=torch.bfloat16).state_dict()
    in_fp32 = {name for name, tensor in stock.items() if tensor.dtype == torch.float32}
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in in_fp32
    with open_weight_files(run / "exported16") as files:
        assert {name for name, tensor in files.tensors.items() if tensor.dtype != torch.bfloat16} == in_fp32


@pytest.mark.slow_cases(r"efsdp", why="parallel/test_parity.py trains them, fused and computed files stay")
@pytest.mark.parametrize("shape", ["efsdp", "fused", "computed"])
def test_it_is_so_for_other_shardings_layouts_of_files_and_rules_that_compute(shape: str, tmp_path: Path) -> None:
    if shape == "efsdp":
        shared_ranks(_train_and_write, 4, "mixtral", em.ParallelConfig(ep=2), tmp_path)
    elif shape == "fused":
        write_fused(random_model(mixtral(num_local_experts=8)), tmp_path / "source")
        shared_ranks(_load_and_write, 2, tmp_path / "source", 2, tmp_path, False)
    else:
        families.random_model("Inkling2ForCausalLM", "inkling2").save_pretrained(tmp_path / "source")
        shared_ranks(_load_and_write, 2, tmp_path / "source", 2, tmp_path, False)
    _check_exports(tmp_path)


def test_it_has_the_dtypes_of_the_source_unless_the_run_or_the_command_says_otherwise(tmp_path: Path) -> None:
    random_model(mixtral(num_local_experts=8), torch.bfloat16).save_pretrained(tmp_path / "source")
    shared_ranks(_load_and_write, 2, tmp_path / "source", 2, tmp_path, False)
    _check_exports(tmp_path)
    path = tmp_path / "checkpoints" / STEP
    assert _dtypes(tmp_path / "live") == {torch.bfloat16}
    _, report = export(path, tmp_path / "32", dtype="float32")
    assert _dtypes(tmp_path / "32") == {torch.float32} == {report.dtype}
    forge_json("layout.json", lambda layout: {**layout, "save_dtype": "float32"})(path)
    export(path, tmp_path / "by the run")
    _same_files(tmp_path / "32", tmp_path / "by the run")
    export(path, tmp_path / "auto", dtype="auto")
    _same_files(tmp_path / "live", tmp_path / "auto")
    forge_json("layout.json", lambda layout: {k: v for k, v in layout.items() if k != "save_dtype"})(path)
    with refused("checkpoint.damaged", IntegrityError):
        export(path, tmp_path / "of a damaged note")


def _dtypes(directory: Path) -> set[torch.dtype]:
    with open_weight_files(directory) as files:
        return {tensor.dtype for tensor in files.tensors.values()}


def test_tensors_that_the_model_leaves_out_are_copied_from_where_they_are_or_said_to_be_lost(tmp_path: Path) -> None:
    source_with_mtp(tmp_path / "source")
    shared_ranks(_load_and_write, 2, tmp_path / "source", 2, tmp_path, False)
    _check_exports(tmp_path)
    _, report = export(tmp_path / "checkpoints" / STEP, tmp_path / "again")
    assert MTP in report.kept
    (tmp_path / "source" / "model.safetensors").unlink()
    _, report = export(tmp_path / "checkpoints" / STEP, tmp_path / "without")
    assert MTP in report.dropped
    assert not report.kept


def test_code_of_the_model_s_own_runs_only_with_the_flag(tmp_path: Path, cache_of_model_code: None) -> None:
    write_list_model(tmp_path / "source")
    shared_ranks(_load_and_write, 2, tmp_path / "source", 2, tmp_path, True)
    with refused("model.remote-code"):
        export(tmp_path / "checkpoints" / STEP, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    _check_exports(tmp_path, trust_remote_code=True)


def test_memory_is_bounded_by_a_block_not_by_a_tensor(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = 0
    read, write_box = WeightFiles.read, safetensors_writer.write_box

    def watched_read(self: WeightFiles, tensor: Any, box: Any, out: torch.Tensor) -> None:
        nonlocal largest
        largest = max(largest, out.numel())
        read(self, tensor, box, out)

    def watched_write(descriptor: int, tensor: Any, box: Any, values: torch.Tensor) -> int:
        nonlocal largest
        largest = max(largest, values.numel())
        return write_box(descriptor, tensor, box, values)

    monkeypatch.setattr(WeightFiles, "read", watched_read)
    monkeypatch.setattr(safetensors_writer, "write_box", watched_write)
    for module in (lazy, write):
        monkeypatch.setattr(module, "_BLOCK_ELEMENTS", 64)
    export(run / "checkpoints" / STEP, tmp_path / "out")
    assert 32 < largest <= 64
    _same_files(run / "live", tmp_path / "out")


@pytest.mark.parametrize("kind", ["model", "layout.json", "config.json", "generation_config.json"])
def test_damage_is_found_before_anything_is_written(copy: Path, tmp_path: Path, kind: str) -> None:
    path = next(path for path in sorted(copy.rglob("*")) if path.is_file() and path.name.startswith(kind))
    flip_a_bit(path.relative_to(copy).as_posix(), 1.0)(copy)
    with refused("checkpoint.damaged", IntegrityError, naming=path.name):
        export(copy, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [STEP]


def test_optimizer_files_are_not_read(copy: Path, tmp_path: Path) -> None:
    flip_a_bit(next(copy.glob("optimizer-*")).name, 1.0)(copy)
    export(copy, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("when", ["before", "while writing"])
def test_a_full_disk_says_what_is_needed_and_leaves_nothing(
    copy: Path, tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if when == "before":
        monkeypatch.setattr(directory_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=17))
    else:
        real, done = os.pwrite, []

        def fills_up(*arguments: Any) -> int:
            done.append(0)
            if len(done) > 20:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*arguments)

        monkeypatch.setattr(os, "pwrite", fills_up)
    with refused("output.no-space", naming="bytes free, 1"):
        export(copy, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [STEP]


def test_a_target_that_holds_anything_is_refused(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "keep.txt").write_text("mine")
    with refused("output.not-empty", naming="out"):
        export(copy, tmp_path / "out")
    assert (tmp_path / "out" / "keep.txt").read_text() == "mine"


def test_a_checkpoint_of_another_model_is_refused(copy: Path, tmp_path: Path) -> None:
    forge_json("huggingface/config.json", lambda config: {**config, "num_hidden_layers": 3})(copy)
    with refused("checkpoint.does-not-fit", IntegrityError, naming="model.layers.2."):
        export(copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_link_to_elsewhere_and_a_pickle_are_not_exported(run: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    for case in ("link", "linked directory", "pickle"):
        path = tmp_path / case / STEP
        shutil.copytree(run / "checkpoints" / STEP, path)
        tokenizer = path / "huggingface" / "tokenizer.json"
        if case == "pickle":
            replace_file("huggingface/tokenizer.json", pickle.dumps({"a": 1}))(path)
        elif case == "link":
            secret.write_bytes(tokenizer.read_bytes())
            tokenizer.unlink()
            tokenizer.symlink_to(secret)
        else:
            shutil.move(path / "huggingface", tmp_path / "elsewhere")
            (path / "huggingface").symlink_to(tmp_path / "elsewhere")
        with refused(
            "checkpoint.unsafe", SecurityError, naming="tokenizer.json" if case != "linked directory" else path.name
        ):
            export(path, tmp_path / "exported")
        assert not (tmp_path / "exported").exists()
