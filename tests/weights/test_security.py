"""Files that somebody prepared: refused in the same words on every rank, before anything is allocated or run."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from expertmesh.config import ParallelConfig
from expertmesh.config.errors import ExpertmeshError, InputError, IntegrityError, SecurityError
from expertmesh.distributed.mesh import init_mesh
from expertmesh.model import load_model
from expertmesh.weights import load
from tests.support.ranks import shared_ranks
from tests.weights.tiny import qwen3_moe, random_model

EXPERT_7 = "model.layers.1.mlp.experts.7.down_proj.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    random_model(qwen3_moe()).save_pretrained(directory, max_shard_size="40KB")
    return directory


def _shard_of(directory: Path, name: str) -> Path:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    return directory / index["weight_map"][name]


def _rewrite(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def _edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _cut(directory: Path) -> Path:
    path = _shard_of(directory, EXPERT_7)
    os.truncate(path, path.stat().st_size - 1)
    return path


def _flip(directory: Path) -> Path:
    path = _shard_of(directory, EXPERT_7)
    content = bytearray(path.read_bytes())
    content[content.index(b'"F32"') + 1] ^= 0x10
    path.write_bytes(content)
    return path


def _remove(directory: Path) -> Path:
    path = _shard_of(directory, EXPERT_7)
    path.unlink()
    return path


def _overlap(directory: Path) -> Path:
    path = _shard_of(directory, EXPERT_7)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    entries[1]["data_offsets"] = entries[0]["data_offsets"]
    entries[1]["shape"] = entries[0]["shape"]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    return path


def _claim(directory: Path) -> Path:
    path = _shard_of(directory, EXPERT_7)
    content = path.read_bytes()
    path.write_bytes((1 << 40).to_bytes(8, "little") + content[8:])
    return path


def _leave(directory: Path) -> Path:
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][EXPERT_7] = "../" + content["weight_map"][EXPERT_7]
    index.write_text(json.dumps(content))
    return index


def _poison(directory: Path) -> Path:
    path = _shard_of(directory, EXPERT_7)
    _rewrite(path, lambda tensors: tensors[EXPERT_7].fill_(float("nan")))
    return path


def _repeat(directory: Path) -> Path:
    path = _shard_of(directory, "model.embed_tokens.weight")
    _rewrite(path, lambda tensors: tensors.update({EXPERT_7: torch.ones(32, 24)}))
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"][EXPERT_7]  # it would say which of the two counts
    index.write_text(json.dumps(content))
    return path


ATTACKS: dict[str, tuple[Callable[[Path], Path], type[ExpertmeshError], str, str]] = {
    "truncated": (_cut, IntegrityError, "weights.damaged", "ends inside tensor"),
    "bit flip in a header": (_flip, IntegrityError, "weights.damaged", "which does not exist"),
    "file not there": (_remove, InputError, "weights.not-found", "no such file"),
    "overlapping offsets": (_overlap, SecurityError, "weights.unsafe", "overlap"),
    "header larger than the file": (_claim, SecurityError, "weights.unsafe", "a header of 1099511627776 bytes"),
    "index that leaves its directory": (_leave, SecurityError, "weights.unsafe-name", "names the weights file '../"),
    "values that are not finite": (_poison, IntegrityError, "weights.not-finite", EXPERT_7),
    "expert twice": (_repeat, IntegrityError, "weights.duplicate-tensor", EXPERT_7),
}


def _load_or_error(good: Path, bad: Path, bad_rank: int) -> tuple[str, str, list[str]]:
    """Load on 2 ranks of which one sees a bad copy, as on machines with disks of their own."""
    allocated: list[str] = []

    def counted(model: Any, device: Any) -> None:
        allocated.append(str(device))
        materialize(model, device)

    materialize = load.materialize
    directory = bad if dist.get_rank() == bad_rank else good
    mesh = init_mesh(ParallelConfig(ep=2), device=torch.device("cpu"))
    with pytest.raises(ExpertmeshError) as caught, mock.patch.object(load, "materialize", counted):
        load_model(directory, mesh)
    dist.barrier()  # The group still works: nobody was left inside a collective.
    return f"{type(caught.value).__name__} of key {caught.value.key}", str(caught.value), allocated


@pytest.mark.slow_cases(
    r"(bit flip in a header|file not there|header larger than the file|expert twice)",
    why="test_safetensors_reader.py has every damage in one process; one of each class of error stays",
)
@pytest.mark.parametrize("name", ATTACKS)
def test_what_one_rank_sees_every_rank_refuses_in_the_same_words(name: str, checkpoint: Path, tmp_path: Path) -> None:
    attack, error, key, words = ATTACKS[name]
    bad = tmp_path / "bad"
    bad.mkdir()
    for path in checkpoint.iterdir():
        (bad / path.name).write_bytes(path.read_bytes())
    named = attack(bad)
    first, second = shared_ranks(_load_or_error, 2, checkpoint, bad, 1)
    assert first[:2] == second[:2]
    kind, sentence, _ = first
    assert (kind, error.exit_code) == (
        f"{error.__name__} of key {key}",
        {InputError: 2, IntegrityError: 3, SecurityError: 4}[error],
    )
    assert words in sentence
    assert named.name in sentence
    # The rank that saw it had allocated nothing, unless it takes values to see it.
    assert second[2] == (["cpu"] if attack is _poison else [])


def test_a_value_only_one_rank_reads_stops_all(checkpoint: Path) -> None:
    _poison(checkpoint)  # expert 7 is rank 1's
    first, second = shared_ranks(_load_or_error, 2, checkpoint, checkpoint, 1)
    assert first[:2] == second[:2]
    assert f"tensor {EXPERT_7} holds a value that is not finite" in first[1]


@pytest.mark.slow_cases(
    r"(num_local_experts-0|num_hidden_layers-0|moe_intermediate_size-)",
    why="one of experts, of layers and of sizes stays",
)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_local_experts": 4}, ["gate.weight: files (8, 32)", "(4, 32)"]),
        ({"num_local_experts": 16}, ["files (8, 48, 32)", "(16, 48, 32)"]),
        ({"vocab_size": 60}, ["model.embed_tokens.weight: files (50, 32), model (60, 32)"]),
        ({"num_hidden_layers": 1}, ["unexpected", "model.layers.1."]),
        ({"num_hidden_layers": 3}, ["missing", "model.layers.2."]),
        ({"moe_intermediate_size": 12}, ["files (8, 32, 24), model (8, 32, 12)"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_config_that_disagrees_with_the_tensors_names_them(
    changes: dict[str, Any], words: list[str], checkpoint: Path
) -> None:
    _edit_config(checkpoint, **changes)
    first, second = shared_ranks(_load_or_error, 2, checkpoint, checkpoint, 1)
    assert first == second
    kind, sentence, allocated = first
    assert (kind, allocated) == ("IntegrityError of key weights.does-not-fit", [])
    assert all(each in sentence for each in words), sentence


class _Canary:
    """Pickled, it is a call that creates `path` as soon as somebody unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.slow_cases(r"(model\.pt|consolidated.*)", why="another name each; two stay")
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt"])
def test_a_pickle_is_refused_and_never_opened(name: str, checkpoint: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for path in checkpoint.glob("model*.safetensors*"):
        path.unlink()
    (checkpoint / name).write_bytes(pickle.dumps(_Canary(canary)))
    first, second = shared_ranks(_load_or_error, 2, checkpoint, checkpoint, 1)
    assert first == second
    assert first[0] == "SecurityError of key weights.pickle"
    assert name in first[1]
    assert not first[2], "memory was allocated for a pickle"
    assert not canary.exists()
    pickle.loads((checkpoint / name).read_bytes())
    assert canary.exists(), "the canary would have sung"


@pytest.mark.slow_cases(r"(pytorch_model.*|/etc/passwd)", why="the relative path stays")
@pytest.mark.parametrize("name", ["pytorch_model.bin", "../model.safetensors", "/etc/passwd"])
def test_a_config_cannot_name_other_weights_either(name: str, checkpoint: Path) -> None:
    _edit_config(checkpoint, transformers_weights=name)
    first, second = shared_ranks(_load_or_error, 2, checkpoint, checkpoint, 1)
    assert first == second
    assert first[0] == "SecurityError of key weights.unsafe-name"
    assert repr(name) in first[1]


def test_code_of_a_model_does_not_run_without_the_flag(checkpoint: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    _edit_config(checkpoint, model_type="made_up", auto_map={"AutoConfig": "made_up.MadeUp"})
    (checkpoint / "made_up.py").write_text(f"open({str(canary)!r}, 'w')")
    first, second = shared_ranks(_load_or_error, 2, checkpoint, checkpoint, 1)
    assert first == second
    assert first[0] == "InputError of key model.remote-code"
    assert "made_up.MadeUp" in first[1]
    assert not canary.exists()


def test_a_config_nested_without_end_is_plain_bad_input(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("[" * 1_000_000)
    (kind, sentence, _), _ = shared_ranks(_load_or_error, 2, checkpoint, checkpoint, 1)
    assert kind == "InputError of key model.invalid-config"
    assert "config.json" in sentence
