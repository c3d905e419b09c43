"""`verify` finds everything that is wrong with a checkpoint, whatever the hashes say, and nothing with a sound one."""

import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import expertmesh as em
from expertmesh.checkpoint.manifest import MANIFEST
from expertmesh.checkpoint.read import open_state
from expertmesh.checkpoint.small_files import RNG_FILE
from expertmesh.checkpoint.state import fingerprint, fingerprint_share
from expertmesh.config.errors import ExpertmeshError, IntegrityError, SecurityError
from expertmesh.export.checkpoint import export
from expertmesh.io.boxes import full_box
from expertmesh.io.safetensors_reader import WeightFiles, as_bytes
from expertmesh.training.resume import read_counters
from expertmesh.verification import checkpoint as verification
from expertmesh.verification.checkpoint import Verification, verify
from expertmesh.weights.audit import HashedSlice
from tests.checkpoint.damage import (
    EXPERTS,
    Canary,
    Damage,
    change_manifest,
    flip_a_bit,
    remove,
    replace_file,
    truncate,
)
from tests.checkpoint.forge import forge_json, forge_metadata, forge_tensors
from tests.checkpoint.test_faults import DAMAGED
from tests.checkpoint.tiny import save
from tests.support.errors import refused
from tests.support.ranks import shared_ranks

# Experts 0 to 3 are in the first files, 4 to 7 in the second; in the first are also the parts that all ranks held.
MODEL = ("model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors")
MOMENTS = ("optimizer-00000-of-00002.safetensors", "optimizer-00001-of-00002.safetensors")
GATE_UP = EXPERTS.replace("down_proj", "gate_up_proj")
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint, and the whole state that was saved in it."""
    directory = tmp_path_factory.mktemp("checkpoints")
    states = shared_ranks(save, 2, "qwen3_moe", em.ParallelConfig(ep=2), 1, directory)
    return directory / "step-00000001", states[0]


@pytest.fixture(scope="module")
def replicated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints")
    shared_ranks(save, 2, "qwen3_moe", em.ParallelConfig(ep=1, replicate=2), 1, directory)
    return directory / "step-00000001"


def _spoilt(good: Path, tmp_path: Path, *damages: Damage) -> Path:
    path: Path = shutil.copytree(good, tmp_path / good.name)
    for damage in damages:
        damage(path)
    return path


def _found(path: Path) -> list[str]:
    return [finding.text for finding in verify(path).findings]


def _has_every_expert_right(verified: Verification, state: dict[str, torch.Tensor]) -> None:
    assert [experts.layer for experts in verified.experts] == ["layer 0", "layer 1"]
    for experts in verified.experts:
        assert experts.slices == (
            HashedSlice("gate_up_proj", "float32", (32, 32)),
            HashedSlice("down_proj", "float32", (32, 16)),
        )
        for number in range(8):
            slices = [state[f"{experts.module}.{part.name}"][number].contiguous() for part in experts.slices]
            data = b"".join(part.numpy().tobytes() for part in slices)
            assert experts.sha256[number] == hashlib.sha256(data).hexdigest()
            norm = torch.cat([part.reshape(-1) for part in slices]).double().norm()
            assert experts.norm[number] == pytest.approx(float(norm), rel=1e-12)


def test_a_sound_checkpoint_has_no_findings_and_a_hash_of_every_expert_that_was_saved(
    good: tuple[Path, dict[str, torch.Tensor]], replicated: Path
) -> None:
    path, state = good
    verified = verify(path)
    assert verified.findings == ()
    assert verified.experts_left_out is None
    assert (verified.slots, verified.without_slots) == (("exp_avg", "exp_avg_sq", "step"), ())
    assert verified.replicated == len(verified.manifest.trained)  # the step counts
    _has_every_expert_right(verified, state)
    copies = verify(replicated)
    assert copies.findings == ()
    assert copies.replicated > 3 * len(copies.manifest.trained)


@pytest.mark.parametrize("case", DAMAGED)
def test_whatever_loading_refuses_is_found(
    good: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, case: str
) -> None:
    damage, kind, _ = DAMAGED[case]
    path = _spoilt(good[0], tmp_path, damage)
    found: type[ExpertmeshError] | None = None
    try:
        findings = verify(path).findings
    except ExpertmeshError as error:
        found = type(error)
    else:
        found = IntegrityError if findings and not any(finding.unsafe for finding in findings) else None
    assert found is kind


def test_a_flipped_bit_is_found_in_every_file_and_no_other_is_blamed(
    good: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    names = [path.relative_to(good[0]).as_posix() for path in good[0].rglob("*") if path.is_file()]
    assert len(names) == 10
    for name in set(names) - {MANIFEST}:
        path = _spoilt(good[0], tmp_path / name.replace("/", "-"), flip_a_bit(name, 1.0))
        found = _found(path)
        assert f"{path / name}: damaged: its content is not what was written (sha256 differs)" in found
        assert all(text.startswith(f"{path / name}: ") for text in found)  # a step count differs from the other ranks'


def test_everything_that_is_wrong_is_named_at_once(good: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    path = _spoilt(
        good[0],
        tmp_path,
        truncate(MODEL[1]),
        remove(MOMENTS[0]),
        flip_a_bit(MOMENTS[1], 0.9),
        lambda path: (path / "huggingface" / "notes.txt").write_text("mine"),
        forge_json("state.json", lambda state: {**state, "step": 7}),
    )
    size = (good[0] / MODEL[1]).stat().st_size
    assert _found(path) == [
        f"{path}/huggingface/notes.txt: is not part of the checkpoint; remove it",
        f"{path}/{MOMENTS[0]}: missing, but the checkpoint's manifest names it (No such file or directory)",
        f"{path}/{MODEL[1]}: has {size - 1} bytes, not the {size} that the manifest says",
        f"{path}/{MOMENTS[1]}: damaged: its content is not what was written (sha256 differs)",
        f"{path}/state.json: is of step 7, the manifest of step 1",
    ]
    left_out = verify(path).experts_left_out
    assert left_out is not None
    assert "can be read" in left_out


def _copy_expert(tensors: dict[str, torch.Tensor]) -> None:
    for name in (GATE_UP, EXPERTS):
        tensors[name][3] = tensors[name][1]


def _kill_expert(tensors: dict[str, torch.Tensor]) -> None:
    for name in (GATE_UP, EXPERTS):
        tensors[name][2] = 0


def _two_not_finite(tensors: dict[str, torch.Tensor]) -> None:
    tensors[EXPERTS][1, 2, 3:5] = torch.tensor([float("nan"), float("inf")])


LYING: dict[str, tuple[Damage, str]] = {
    "an expert twice": (forge_tensors(MODEL[1], _copy_expert), "expert 5 and expert 7 of layer 1 are byte-identical"),
    "a dead expert": (forge_tensors(MODEL[0], _kill_expert), "expert 2 of layer 1 is dead: all its weights are 0"),
    "not finite": (
        forge_tensors(MODEL[1], _two_not_finite),
        f"2 values of {EXPERTS}, its part from [4, 0, 0] on are not finite",
    ),
    "moments not finite": (
        forge_tensors(MOMENTS[0], lambda t: t[f"optimizer.{NORM}.exp_avg"].fill_(float("inf"))),
        f"16 values of optimizer.{NORM}.exp_avg are not finite",
    ),
    "another step count than all ranks held": (
        forge_tensors(MOMENTS[0], lambda t: t[f"optimizer.{NORM}.step"].add_(1)),
        f"optimizer.{NORM}.step is not what 2 ranks held alike (its fingerprint differs)",
    ),
    "another fingerprint": (
        forge_metadata(MOMENTS[0], lambda m: {**m, "fingerprints": m["fingerprints"].replace(": ", ": 1")}),
        f"optimizer.{NORM}.step is not what 2 ranks held alike (its fingerprint differs)",
    ),
    "state of another step": (forge_json("state.json", lambda s: {**s, "step": 9}), "is of step 9, the manifest of"),
    "generators of one rank": (
        forge_tensors(RNG_FILE, lambda t: t.update(cpu=t["cpu"][:1])),
        "does not hold generators of 2 ranks",
    ),
    "a layout of other files": (
        forge_json("layout.json", lambda layout: {**layout, "tensors": {}}),
        "does not fit Qwen3MoeForCausalLM",
    ),
    "a config of another size": (
        forge_json("huggingface/config.json", lambda config: {**config, "moe_intermediate_size": 8}),
        "does not fit the model: ",
    ),
    "another layout than world size": (
        change_manifest(lambda m: m.update(world_size=4)),
        "its layout is not one of 4 ranks",
    ),
    "no such axes": (change_manifest(lambda m: m["layout"].pop("tp")), "layout names other axes than"),
    "a config that is not there": (change_manifest(lambda m: m.update(config_sha256="0" * 64)), "config_sha256"),
    "trained, but not there": (change_manifest(lambda m: m["trained"].append("x")), "x: is trained, but not in the ch"),
    "not trained, but moments": (
        change_manifest(lambda m: m["trained"].remove(NORM)),
        f"optimizer.{NORM}.exp_avg: is optimizer state of a parameter that is not trained",
    ),
}


@pytest.mark.parametrize("case", LYING)
def test_what_hashes_cannot_tell_is_found(
    good: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, case: str
) -> None:
    damage, said = LYING[case]
    found = _found(_spoilt(good[0], tmp_path, damage))
    assert any(said in text for text in found), found


def _again(text: str) -> Damage:
    """The manifest with `text` before its first key: what it says is then said twice."""

    def damage(path: Path) -> None:
        (path / MANIFEST).write_text("{" + text + (path / MANIFEST).read_text()[1:])

    return damage


def _counted(**changes: Any) -> Damage:
    return forge_json("state.json", lambda s: {**s, "state": {"counters": {"step": 1, **changes}}})


IMPOSSIBLE: dict[str, tuple[Damage, str]] = {
    "schema true": (change_manifest(lambda m: m.update(schema_version=True)), "schema_version is True"),
    "schema 2.0": (change_manifest(lambda m: m.update(schema_version=2.0)), "schema_version is 2.0"),
    "a step twice": (_again('"step": 1, '), "step appears twice"),
    "an axis more": (change_manifest(lambda m: m["layout"].update(up=1)), "layout names other axes"),
    "an axis of none": (change_manifest(lambda m: m["layout"].update(tp=0)), "its layout is not one of 2 ranks"),
    "experts of others": (change_manifest(lambda m: m["layout"].update(ep=4)), "ep and efsdp of its layout (4, "),
    "another step": (
        change_manifest(lambda m: m.update(step=7)),
        "step is 7, but its directory is called step-00000001; rename it to step-00000007",
    ),
    "a step below zero": (change_manifest(lambda m: m.update(step=-1)), "step: "),
    "a step without end": (change_manifest(lambda m: m.update(step=10**30)), "step: "),
    "ranks without end": (change_manifest(lambda m: m.update(world_size=10**12)), "world_size: "),
    "copies on no ranks": (change_manifest(lambda m: m["tilings"][0].update(copies=10**9)), "1000000000 copies of"),
    "no time": (change_manifest(lambda m: m.update(created="\x1b[31mnow")), "which is no time"),
    "deep": (change_manifest(lambda m: m.update(versions=json.loads("[" * 200 + "]" * 200))), "nested more than 100"),
    "a config that is another": (change_manifest(lambda m: m.update(config_sha256="0" * 64)), "config_sha256"),
    "a fingerprint that is none": (
        forge_metadata(MOMENTS[0], lambda m: {**m, "fingerprints": json.dumps({f"optimizer.{NORM}.step": 2**80})}),
        "which cannot be",
    ),
    "weights": (forge_tensors(MODEL[1], _two_not_finite), "not finite"),
}


def _read_as_resume_does(path: Path) -> None:
    with open_state(path) as state:
        for name, entry in state.manifest.model.items():
            box = full_box(entry.shape)
            state.check_finite(name, box, state.read(name, box))


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_what_cannot_be_is_refused_alike_by_verify_export_and_resume(
    good: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, case: str
) -> None:
    damage, said = IMPOSSIBLE[case]
    path = _spoilt(good[0], tmp_path, damage)
    try:
        found = "\n".join(_found(path))
    except IntegrityError as error:
        found = str(error)
    assert said in found
    with pytest.raises(IntegrityError) as caught:
        export(path, tmp_path / "out")
    assert said in str(caught.value)
    with pytest.raises(IntegrityError) as caught:
        _read_as_resume_does(path)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"step": 2},
        {"step": True},
        {"tokens": -1},
        {"tokens": 1.5},
        {"seconds": 1e300},
        {"more": 1},
        {"expert_load": [[-1]]},
    ],
    ids=str,
)
def test_counters_that_no_loop_has_counted_are_found_and_not_resumed(
    good: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, changes: dict[str, Any]
) -> None:
    path = _spoilt(good[0], tmp_path, _counted(**changes))
    assert any("is not the state of a training run (counters: " in text for text in _found(path))
    with refused("checkpoint.damaged", IntegrityError, naming=next(iter(changes))):
        read_counters(path, {"step": 1, **changes}, 1)


@pytest.mark.parametrize("lost", [["exp_avg_sq"], ["exp_avg", "exp_avg_sq", "step"]])
def test_moments_that_are_missing_are_found(
    good: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, lost: list[str]
) -> None:
    keys = {f"optimizer.{EXPERTS}.{slot}" for slot in lost}

    def forget(tensors: dict[str, torch.Tensor]) -> None:
        for key in keys & tensors.keys():
            del tensors[key]

    def unnamed(manifest: dict[str, Any]) -> None:
        for key in keys:
            del manifest["optimizer"][key]

    path = _spoilt(good[0], tmp_path, *(forge_tensors(name, forget) for name in MOMENTS), change_manifest(unnamed))
    text = f"{EXPERTS}: is trained, but its optimizer state {' and '.join(lost)} is not in the checkpoint"
    assert _found(path) == [text]


def test_an_optimizer_that_has_not_stepped_is_said_not_blamed(
    good: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    def unstepped(manifest: dict[str, Any]) -> None:
        manifest["optimizer"].clear()
        manifest["files"] = [file for file in manifest["files"] if not file["name"].startswith("optimizer")]

    path = _spoilt(good[0], tmp_path, *map(remove, MOMENTS), change_manifest(unstepped))
    verified = verify(path)
    assert verified.findings == ()
    assert "model.layers.*.mlp.experts.down_proj" in verified.without_slots


def test_other_copies_of_a_replicated_part_are_found(replicated: Path, tmp_path: Path) -> None:
    name = MODEL[0]
    path = _spoilt(replicated, tmp_path, forge_tensors(name, lambda tensors: tensors[EXPERTS][0, 0, 0].mul_(2)))
    assert _found(path) == [f"{path / name}: {EXPERTS} is not what 2 ranks held alike (its fingerprint differs)"]


@pytest.mark.parametrize("size", [0, 3, 4, 5, 4096, 4099])
def test_a_fingerprint_in_blocks_is_that_of_the_whole(size: int) -> None:
    tensor = torch.randint(256, (size,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    shares = [fingerprint_share(as_bytes(tensor[at : at + 64].clone()), at) for at in range(0, size, 64)]
    assert int(sum(shares, torch.zeros((), dtype=torch.int64))) == fingerprint(tensor)


def test_a_pickle_under_any_name_is_refused_by_every_reader_and_never_opened(
    good: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    names = [path.relative_to(good[0]).as_posix() for path in good[0].rglob("*") if path.is_file()]
    for number, name in enumerate([*names, ".metadata", "pytorch_model.bin", "model.pkl", "extra"]):
        for protocol in (0, 2, 5):
            content = pickle.dumps(Canary(canary), protocol=protocol)
            path = tmp_path / f"{number}-{protocol}" / good[0].name
            shutil.copytree(good[0], path)
            if name in names and name != MANIFEST:
                replace_file(name, content)(path)
            else:
                (path / name).write_bytes(content)
            try:
                verified = verify(path)
                unsafe = any(finding.unsafe for finding in verified.findings)
                assert verified.findings
            except SecurityError:
                unsafe = True
            except IntegrityError:
                unsafe = False
            # Protocol 0 is text like any other: it is found as damage.
            assert unsafe or protocol == 0, (name, protocol)
            if name in names and not name.startswith(("optimizer", "rng", "state")):
                with pytest.raises(ExpertmeshError):
                    export(path, tmp_path / "out")
            assert not canary.exists()
            assert not (tmp_path / "out").exists()


def test_links_that_lead_out_are_refused_and_those_inside_are_not(
    good: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text((good[0] / "state.json").read_text())

    def link(path: Path) -> None:
        (path / "state.json").unlink()
        (path / "state.json").symlink_to(secret)

    (finding,) = verify(_spoilt(good[0], tmp_path / "out", link)).findings
    assert finding.unsafe
    assert finding.text.endswith(f"state.json: leads out of the checkpoint, to {secret.resolve()}; remove it")

    def inside(path: Path) -> None:
        os.rename(path / "state.json", path / "there.json")
        (path / "state.json").symlink_to("there.json")

    assert _found(_spoilt(good[0], tmp_path / "in", inside)) == [
        f"{tmp_path}/in/{good[0].name}/there.json: is not part of the checkpoint; remove it"
    ]


def test_what_is_no_checkpoint_or_a_newer_one_is_an_input_error(
    good: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    with refused("checkpoint.not-found"):
        verify(tmp_path / "nothing")
    newer = _spoilt(good[0], tmp_path, change_manifest(lambda m: m.update(schema_version=3, more={})))
    with refused("install.too-old", naming="schema version 3"):
        verify(newer)


def test_without_running_a_model_s_own_code_its_experts_are_left_out_and_that_is_said(
    good: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    own = {"model_type": "made_up", "auto_map": {"AutoConfig": "made_up.MadeUp"}}
    path = _spoilt(good[0], tmp_path, forge_json("huggingface/config.json", lambda config: {**config, **own}))
    verified = verify(path)
    assert verified.findings == ()
    assert verified.experts == ()
    assert verified.experts_left_out is not None
    assert "brings its own code" in verified.experts_left_out


def test_memory_is_bounded_by_a_block(
    good: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = 0
    read = WeightFiles.read

    def watched(self: WeightFiles, tensor: Any, box: Any, out: torch.Tensor) -> None:
        nonlocal largest
        largest = max(largest, out.nbytes if tensor.name not in ("the header", "cpu") else 0)
        read(self, tensor, box, out)

    monkeypatch.setattr(WeightFiles, "read", watched)
    monkeypatch.setattr(verification, "_BLOCK_BYTES", 1024)
    monkeypatch.setattr(verification, "_BLOCK_ELEMENTS", 256)
    verified = verify(good[0])
    assert verified.findings == ()
    assert 512 < largest <= 1024
    _has_every_expert_right(verified, good[1])


def test_json_is_all_that_is_beside_tensors(good: tuple[Path, dict[str, torch.Tensor]]) -> None:
    for path in good[0].rglob("*.json"):
        json.loads(path.read_text())
    assert {path.suffix for path in good[0].rglob("*") if path.is_file()} == {".json", ".safetensors"}
