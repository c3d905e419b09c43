"""A damaged, lying or hostile checkpoint is refused by name, alike on all ranks, before anything is changed.

Each case is a copy of one good checkpoint with one thing wrong. Where the manifest lies it lies well: sizes and
hashes are made to fit, so that only what is being tested can find it.
"""

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import expertmesh as em
from expertmesh.checkpoint.manifest import MANIFEST
from expertmesh.checkpoint.small_files import RNG_FILE
from expertmesh.config.errors import ExpertmeshError, InputError, IntegrityError, SecurityError
from expertmesh.state.shards import local_tensor
from tests.checkpoint.damage import (
    EXPERTS,
    Canary,
    Damage,
    change_manifest,
    change_tiling,
    flip_a_bit,
    leave_out,
    remove,
    replace_by,
    replace_file,
    truncate,
)
from tests.checkpoint.tiny import Job, save
from tests.support.models import tiny_model
from tests.support.ranks import shared_ranks

MODEL, OPTIMIZER = "model-00001-of-00002.safetensors", "optimizer-00000-of-00002.safetensors"
SMALL = ("state.json", RNG_FILE, "layout.json")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints")
    shared_ranks(save, 2, "qwen3_moe", em.ParallelConfig(ep=2), 1, directory)
    return directory / "step-00000001"


def _load_each(paths: list[Path]) -> list[tuple[type[ExpertmeshError] | None, str]]:
    """What `load_checkpoint` raises for each; a refusal leaves weights, moments and generators as they were."""
    job = Job(tiny_model("qwen3_moe", seed=9), em.ParallelConfig(ep=2))
    job.train([0])
    outcomes: list[tuple[type[ExpertmeshError] | None, str]] = []
    for path in paths:
        before = _local_state(job)
        try:
            em.load_checkpoint(job.model, job.optimizer, path)
            outcomes.append((None, ""))
        except ExpertmeshError as error:
            outcomes.append((type(error), str(error)))
            assert all(torch.equal(one, other) for one, other in zip(_local_state(job), before, strict=True))
        dist.barrier()
    return outcomes


def _local_state(job: Job) -> list[torch.Tensor]:
    tensors = [*job.model.parameters(), *(t for slots in job.optimizer.state.values() for t in slots.values())]
    return [*(local_tensor(tensor).clone() for tensor in tensors), torch.get_rng_state()]


def _copies(good: Path, root: Path, damages: dict[str, Damage]) -> list[Path]:
    paths = []
    for number, damage in enumerate(damages.values()):
        paths.append(root / str(number) / good.name)
        shutil.copytree(good, paths[-1])
        damage(paths[-1])
    return paths


def _named(name: str) -> Damage:
    return change_manifest(lambda manifest: manifest["files"][0].update(name=name))


DAMAGED: dict[str, tuple[Damage, type[ExpertmeshError], str]] = {
    "truncated": (truncate(MODEL), IntegrityError, f"{MODEL}: has "),
    "no shard": (remove(OPTIMIZER), IntegrityError, f"{OPTIMIZER}: missing, but the checkpoint's manifest names it"),
    "no manifest": (remove(MANIFEST), IntegrityError, f"has no {MANIFEST}; it is not a complete checkpoint"),
    "half a manifest": (
        lambda path: os.truncate(path / MANIFEST, (path / MANIFEST).stat().st_size // 2),
        IntegrityError,
        "manifest.json: damaged: is not JSON",
    ),
    "empty manifest": (lambda path: os.truncate(path / MANIFEST, 0), IntegrityError, "damaged: is not JSON"),
    "a flipped bit in a model shard": (flip_a_bit(MODEL, 0.9), IntegrityError, f"{MODEL}: damaged: its content"),
    "a flipped bit in an optimizer shard": (flip_a_bit(OPTIMIZER, 0.7), IntegrityError, f"{OPTIMIZER}: damaged: its"),
    **{
        f"a flipped bit in {name}": (
            flip_a_bit(name, 0.5),
            IntegrityError,
            f"{name}: damaged: its content is not what was",
        )
        for name in (*SMALL, "huggingface/config.json")
    },
    "newer schema": (
        change_manifest(lambda manifest: manifest.update(schema_version=3)),
        InputError,
        "has schema version 3, newer than the 2 that this version of expertmesh reads; update expertmesh",
    ),
    "no schema": (change_manifest(lambda m: m.update(schema_version="1")), IntegrityError, "damaged: schema_version"),
    "unknown key": (change_manifest(lambda m: m.update(more=1)), IntegrityError, "manifest.json: damaged: more"),
    "a part outside": (
        change_tiling(lambda t: t["cuts"][0].__setitem__(-1, 9)),
        IntegrityError,
        "is [8, 32, 16], its tiling [9, 32, 16]",
    ),
    "no first row": (change_tiling(lambda t: t["cuts"][0].__setitem__(0, 1)), IntegrityError, "not ascend from 0"),
    "an empty part": (change_tiling(lambda t: t["cuts"][0].insert(1, 4)), IntegrityError, "not ascend from 0"),
    "cuts of no dim": (change_tiling(lambda t: t["cuts"].__setitem__(0, [])), IntegrityError, "not ascend from 0"),
    "other cuts": (
        change_tiling(lambda t: t["cuts"][0].__setitem__(1, 3)),
        IntegrityError,
        f"does not hold the part of {EXPERTS} that the manifest says",
    ),
    "gap": (change_tiling(lambda t: t["ranks"].pop()), IntegrityError, "it has 2 parts, but names the ranks of 1"),
    "one rank twice": (
        change_tiling(lambda t: t["ranks"].__setitem__(1, 0)),
        IntegrityError,
        "is not whole: a rank wrote two parts of it",
    ),
    "swapped ranks": (
        change_tiling(lambda t: t["ranks"].reverse()),
        IntegrityError,
        f"part of {EXPERTS} from [0, 0, 0] on, not from [4, 0, 0]",
    ),
    "no such rank": (
        change_tiling(lambda t: t["ranks"].__setitem__(1, 99)),
        IntegrityError,
        "is not whole: the checkpoint has no model-00099-of-00002.safetensors",
    ),
    "no such tiling": (
        change_manifest(lambda m: m["model"][EXPERTS].update(tiling=99)),
        IntegrityError,
        "has the tiling 99, which is not there",
    ),
    "other dims": (change_tiling(lambda t: t["cuts"].pop()), IntegrityError, "is [8, 32, 16], its tiling [8, 32]"),
    "other dtype": (
        change_manifest(lambda m: m["model"][EXPERTS].update(dtype="I32")),
        IntegrityError,
        "does not hold the",
    ),
    "no such dtype": (
        change_manifest(lambda m: m["model"][EXPERTS].update(dtype="F33")),
        IntegrityError,
        "unknown dtype",
    ),
    "tensor left out": (
        change_manifest(lambda m: m["model"].pop(EXPERTS)),
        IntegrityError,
        "the manifest does not name",
    ),
    "tensor twice": (
        change_manifest(lambda m: m["optimizer"].update({EXPERTS: m["model"][EXPERTS]})),
        IntegrityError,
        "is both the model's and the optimizer's",
    ),
    "optimizer of another": (
        change_manifest(lambda m: m["optimizer"].update(x=m["optimizer"].pop(f"optimizer.{EXPERTS}.exp_avg"))),
        IntegrityError,
        "does not hold the part of x",
    ),
    "file twice": (change_manifest(lambda m: m["files"].append(m["files"][0])), IntegrityError, "twice"),
    **{f"{name} unlisted": (leave_out(name), IntegrityError, f"does not name {name}") for name in SMALL},
    **{
        f"{name!r} as a file": (_named(name), SecurityError, f"names the file {name!r}, which is not a plain path")
        for name in ("/etc/hostname", "../../x", "a/../../x", "", "a//b", ".", "a\\b")
    },
    "a directory": (replace_by(RNG_FILE, Path.mkdir), IntegrityError, f"{RNG_FILE}: is not a file"),
    "a pipe": (replace_by("state.json", os.mkfifo), IntegrityError, "state.json: is not a file"),
    "a pipe for the manifest": (
        lambda path: ((path / MANIFEST).unlink(), os.mkfifo(path / MANIFEST))[1],
        IntegrityError,
        "has no manifest.json",
    ),
    **{
        f"{name} is {content!r}": (
            replace_file(name, content),
            # Its first 8 bytes are the length of a header, and that is longer than the file.
            SecurityError if name == RNG_FILE and len(content) > 8 else IntegrityError,
            f"{name}: ",
        )
        for name in SMALL
        for content in (b"[]", b'{"cpu": 3}', b'[{"cpu": "AAAA"}, {"cpu": "AAAA"}]', b"null", b"[" * 100_000)
    },
}


def test_whatever_is_wrong_is_named_alike_on_all_ranks_before_anything_is_changed(good: Path, tmp_path: Path) -> None:
    paths = _copies(good, tmp_path, {name: damage for name, (damage, _, _) in DAMAGED.items()})
    first, second = shared_ranks(_load_each, 2, [*paths, good])
    assert first == second
    wrong = []
    for (case, (_, kind, text)), outcome in zip(DAMAGED.items(), first[:-1], strict=True):
        if outcome[0] is not kind or text not in outcome[1]:
            wrong.append(f"{case}: {kind.__name__} {text!r}, but {outcome}")
    assert not wrong, "\n".join(wrong)
    assert first[-1] == (None, "")


def test_a_pickle_under_any_name_is_never_opened(good: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    content = pickle.dumps(Canary(canary))
    names = [path.relative_to(good).as_posix() for path in sorted(good.rglob("*")) if path.is_file()]
    damages: dict[str, Damage] = {name: replace_file(name, content) for name in names if name != MANIFEST}
    damages[MANIFEST] = lambda path: (path / MANIFEST).write_bytes(content) and None
    damages[".metadata"] = lambda path: (path / ".metadata").write_bytes(content) and None
    outcomes = dict(zip(damages, shared_ranks(_load_each, 2, _copies(good, tmp_path, damages))[0], strict=True))
    assert not canary.exists()
    # What only export reads, or nobody, does not matter here.
    read = {name for name in names if not name.startswith("huggingface/")}
    assert {name for name, (kind, _) in outcomes.items() if kind is not None} == read
    assert {kind for kind, _ in outcomes.values()} <= {None, IntegrityError, SecurityError}
    pickle.loads(content)
    assert canary.exists()
