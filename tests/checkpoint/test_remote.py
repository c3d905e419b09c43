"""Checkpoints in object storage: complete or not there, whatever ends an upload; nothing that comes back is trusted."""

import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from expertmesh.checkpoint import remote as uploads_module
from expertmesh.checkpoint.manifest import MANIFEST, parse_manifest
from expertmesh.checkpoint.remote import RemoteCheckpoints, Shares, Uploads, divided, download, local_checkpoint
from expertmesh.config.errors import InputError, IntegrityError, SecurityError
from expertmesh.distributed.job_store import JobStore
from expertmesh.io import storage as storage_module
from expertmesh.io.directory import make_synced
from expertmesh.io.hub import local_model
from expertmesh.io.storage import Storage, refuse_url
from tests.checkpoint.object_store import Killed, ObjectStore
from tests.support.errors import refused

GOLDEN = Path(__file__).parent / "golden" / "step-00000002"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "PAUSE_SECONDS", 0.0)


def _checkpoint(root: Path, step: int) -> Path:
    """One that says it is of `step`: uploads look at the manifest alone."""
    directory = root / f"step-{step:08d}"
    shutil.copytree(GOLDEN, directory)
    manifest = json.loads((directory / MANIFEST).read_text())
    (directory / MANIFEST).write_text(json.dumps({**manifest, "step": step}))
    return directory


def _content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_whatever_operation_of_an_upload_is_the_last_a_complete_checkpoint_is_there(tmp_path: Path) -> None:
    first, second = _checkpoint(tmp_path, 1), _checkpoint(tmp_path, 2)

    def start() -> tuple[ObjectStore, RemoteCheckpoints]:
        store = ObjectStore()
        remote = RemoteCheckpoints(store.storage())
        remote.publish(first)
        store.seen = 0
        return store, remote

    def upload(remote: RemoteCheckpoints) -> None:
        remote.clean()
        remote.publish(second)
        remote.prune(keep_last=1)

    store, remote = start()
    upload(remote)
    points = store.seen
    assert points > 2 * len(parse_manifest(second).files)
    died = 0
    for at in range(points):
        store, remote = start()
        store.die_at = at
        try:
            upload(remote)
        except Killed:
            died += 1
        store.die_at = None
        newest = remote.newest()
        assert newest in (1, 2)
        into = tmp_path / f"after-{at}"
        assert _content(download(remote, newest, into)) == _content(first if newest == 1 else second)
        upload(remote)  # the next start
        assert set(store.objects) == {f"bucket/run/checkpoints/step-00000002/{name}" for name in _content(second)}
        assert store.objects[f"bucket/run/checkpoints/step-00000002/{MANIFEST}"] == (second / MANIFEST).read_bytes()
    assert died == points


def test_what_fails_is_tried_again_and_then_named(tmp_path: Path) -> None:
    store, first = ObjectStore(), _checkpoint(tmp_path, 1)
    remote = RemoteCheckpoints(store.storage())
    store.fail = storage_module.ATTEMPTS - 1
    assert remote.publish(first)
    assert not remote.publish(first)
    store.fail = 10**6
    with refused("storage.failed", naming="connection reset"):
        remote.newest()
    store.error, store.attempts = PermissionError("Access Denied"), 0
    with refused("storage.failed", naming="Access Denied"):
        remote.newest()
    assert store.attempts == 1
    store.fail, store.error = 10**6, FileNotFoundError("The specified bucket does not exist")
    assert remote.newest() is None
    with refused("storage.failed", naming="bucket does not exist"):
        remote.run.write("probe", b"")


def test_entries_of_what_a_mounted_storage_holds_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rng").mkdir()
    (tmp_path / "rng" / "rank-0").write_text("numbers")
    root, synced = tmp_path / "mounted" / "step-00000001", list[str]()
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    Storage(f"file://{root}").put(tmp_path, ["rng/rank-0"])
    assert synced == [str(root / "rng" / "rank-0"), str(root / "rng"), str(root), str(root.parent)]
    synced.clear()
    make_synced(tmp_path / "a" / "b")
    assert set(synced) == {str(tmp_path), str(tmp_path / "a")}


def test_another_runs_checkpoints_are_not_written_over(tmp_path: Path) -> None:
    remote = RemoteCheckpoints(ObjectStore().storage())
    second = _checkpoint(tmp_path, 2)
    remote.publish(second)
    with refused("storage.other-run", naming="step-00000002"):
        remote.publish(_checkpoint(tmp_path / "another", 1))
    assert remote.publish(_checkpoint(tmp_path, 1))  # the best one of the run that has written both
    other = _checkpoint(tmp_path / "other", 2)
    (other / MANIFEST).write_text((other / MANIFEST).read_text() + "\n")
    with refused("storage.other-run"):
        remote.publish(other)


def test_what_comes_from_storage_is_not_trusted(tmp_path: Path) -> None:
    def stored(**objects: bytes | None) -> tuple[ObjectStore, RemoteCheckpoints]:
        store = ObjectStore()
        remote = RemoteCheckpoints(store.storage())
        remote.publish(checkpoint)
        store.read = 0
        for name, content in objects.items():
            store.objects[f"bucket/run/checkpoints/step-00000002/{name}"] = content or b""
        return store, remote

    checkpoint = _checkpoint(tmp_path, 2)
    manifest = (checkpoint / MANIFEST).read_text()
    total = parse_manifest(checkpoint).total_bytes
    for name in ("../../../../etc/x", "/etc/x", "a//b", "a\\b"):
        _, remote = stored(**{name: b"x"})
        with refused("storage.unsafe-name", SecurityError):
            remote.newest()
        _, remote = stored(**{MANIFEST: manifest.replace("layout.json", json.dumps(name)[1:-1]).encode()})
        with refused("checkpoint.unsafe", SecurityError):
            download(remote, 2, tmp_path / "a")
    store, remote = stored(**{"layout.json": b"x" * (1 << 26)})
    with refused("storage.failed", naming="layout.json"):
        download(remote, 2, tmp_path / "b")
    assert store.read < 2 * (total + len(manifest)) * storage_module.ATTEMPTS
    size = (checkpoint / "layout.json").stat().st_size
    _, remote = stored(**{"layout.json": b"x" * size})
    with refused("checkpoint.damaged", IntegrityError, naming="layout.json"):
        download(remote, 2, tmp_path / "c")
    assert not [path for name in "abc" for path in (tmp_path / name).glob("*")]
    _, remote = stored(**{MANIFEST: manifest[: len(manifest) // 2].encode()})
    assert remote.newest() is None
    assert remote.clean() == ["step-00000002"]


def test_a_run_outlives_its_storage_and_nothing_that_waits_is_pruned(tmp_path: Path) -> None:
    store, paths = ObjectStore(), [_checkpoint(tmp_path, step) for step in (1, 2, 3)]
    remote = RemoteCheckpoints(store.storage())
    uploads = Uploads(remote, 1, lambda: None)
    store.fail = 10**6
    uploads.submit(paths[0], None)
    uploads.submit(paths[1], keep_step=1)
    assert 2 in uploads.held()
    with refused("storage.upload-failed", naming="step-00000002"):
        uploads.finish()
    assert 2 in uploads.held()
    store.fail = 0
    uploads = Uploads(remote, 1, lambda: None)
    uploads.submit(paths[0], keep_step=1)
    uploads.submit(paths[1], keep_step=1)
    uploads.submit(paths[2], keep_step=1)
    uploads.finish()
    assert list(remote.complete()) == [3, 1]
    assert uploads.held() == set()


def test_a_stop_waits_for_an_upload_within_a_limit(tmp_path: Path) -> None:
    go_on = threading.Event()

    def slow() -> None:
        go_on.wait()

    uploads = Uploads(RemoteCheckpoints(ObjectStore().storage()), 1, slow)
    uploads.submit(_checkpoint(tmp_path, 1), None)
    with refused("storage.upload-failed"):
        uploads.finish(within_seconds=0.0)
    go_on.set()
    uploads.finish()
    assert uploads.remote.newest() == 1


def _ranks(root: Path, store: ObjectStore) -> tuple[list[Shares], ObjectStore]:
    """Three ranks of one job, and the same store over the network of rank 1."""
    theirs, post = ObjectStore(), dist.HashStore()
    theirs.objects = store.objects
    networks = [store, theirs, store]
    return [Shares(JobStore(post, ""), rank, 3, each.storage(), root) for rank, each in enumerate(networks)], theirs


def test_a_checkpoint_is_published_when_the_share_of_the_slowest_rank_has_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads_module, "POLL_SECONDS", 0.01)
    store, checkpoints = ObjectStore(), [_checkpoint(tmp_path, step) for step in (1, 2, 3)]
    (first, *others), slow = _ranks(tmp_path, store)
    slow.go_on.clear()
    uploads = Uploads(RemoteCheckpoints(store.storage()), 1, lambda: None, first.put)
    there = "bucket/run/checkpoints/step-00000001"
    late = [f"{there}/{kind}-00001-of-00002.safetensors" for kind in ("model", "optimizer")]
    uploads.submit(checkpoints[0], None)
    deadline = time.monotonic() + 30
    try:
        while len(store.objects) < len(_content(checkpoints[0])) - 1 - len(late):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.1)
        assert not [name for name in store.objects if name in late or name.endswith(MANIFEST)]
        uploads.submit(checkpoints[1], None)
        uploads.submit(checkpoints[2], None)
        assert uploads.held() == {1, 3}  # the second is never uploaded: a newer one waits
    finally:
        slow.go_on.set()
    uploads.finish()
    first.end()
    for rank in others:
        rank.wait()
    assert list(uploads.remote.complete()) == [3]
    assert set(store.objects) == {f"bucket/run/checkpoints/step-00000003/{name}" for name in _content(checkpoints[2])}


def test_a_rank_that_cannot_upload_or_is_lost_is_named_and_the_checkpoint_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads_module, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(uploads_module, "SILENT_SECONDS", 0.2)
    store, checkpoint = ObjectStore(), _checkpoint(tmp_path, 1)
    (first, *_), broken = _ranks(tmp_path, store)
    remote = RemoteCheckpoints(store.storage())
    broken.fail = 10**6
    with refused("storage.failed", naming="rank 1: s3://bucket/run"):
        remote.publish(checkpoint, first.put)
    assert remote.newest() is None
    broken.fail = 0
    assert remote.publish(checkpoint, first.put)
    alone = Shares(JobStore(dist.HashStore(), ""), 0, 2, store.storage(), tmp_path)
    with refused("storage.failed", naming="rank 1 has not answered"):
        remote.publish(_checkpoint(tmp_path, 2), alone.put)
    assert list(remote.complete()) == [1]
    alone.end()


def test_each_rank_uploads_what_it_wrote_and_as_many_parts_of_a_model_as_another() -> None:
    parts = [f"model-{number:05d}-of-00004.safetensors" for number in range(4)]
    assert divided([*parts, "layout.json", "rng/states.json"], 2) == [
        [parts[0], parts[2], "layout.json", "rng/states.json"],
        [parts[1], parts[3]],
    ]
    assert [len(share) for share in divided(parts, 8)] == [1, 1, 1, 1, 0, 0, 0, 0]


def test_an_error_that_no_storage_has_is_not_kept_quiet(tmp_path: Path) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    uploads = Uploads(RemoteCheckpoints(ObjectStore().storage()), 1, broken)
    uploads.submit(_checkpoint(tmp_path, 1), None)
    with pytest.raises(ZeroDivisionError):
        uploads.finish()


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("ftp://host/run", "storage.unsupported-url"),
        ("memory://run", "storage.unsupported-url"),
        ("s3://", "storage.unsupported-url"),
        ("s3://bucket/../other", "storage.unsupported-url"),
        ("s3://key:secret@bucket/run", "storage.unsupported-url"),
        ("s3://bucket/run?token=secret", "storage.unsupported-url"),
        ("missing://bucket/run", "install.missing-package"),
    ],
)
def test_urls_that_cannot_be_opened_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, url: str, key: str) -> None:
    monkeypatch.setitem(storage_module.refuse_url.__globals__["PACKAGES"], "missing", "no_such_package_of_fsspec")
    with pytest.raises(InputError) as caught:
        refuse_url(url, "checkpoint.remote")
    assert caught.value.key == key
    assert "secret" not in str(caught.value)


def test_tools_read_a_copy_of_what_storage_holds_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run, url = tmp_path / "run", f"file://{tmp_path}/run"
    with refused("storage.not-found"):
        local_checkpoint(url)
    _checkpoint(run / "checkpoints", 1)
    second = _checkpoint(run / "checkpoints", 2)
    cut = _checkpoint(run / "checkpoints", 3)
    (cut / MANIFEST).write_text("{")
    for path in (url, f"{url}/checkpoints", f"{url}/checkpoints/{second.name}/"):
        copy = local_checkpoint(path)
        assert copy.name == second.name
        assert _content(copy) == _content(second)
        assert copy.is_relative_to(tmp_path / "cache")
    (second / "layout.json").write_bytes(b"x" * (second / "layout.json").stat().st_size)
    assert _content(local_checkpoint(url)) == _content(copy)
    with refused("checkpoint.damaged", IntegrityError, naming="layout.json"):
        local_checkpoint(url, anew=True)


def test_a_model_is_read_from_storage_without_code_or_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, url = tmp_path / "model", f"file://{tmp_path}/model"
    model.mkdir()
    with refused("storage.not-found", naming="config.json"):
        local_model(url)
    (model / "original").mkdir()  # GPT-OSS has its weights there in another form, too
    for name in ("config.json", "model.safetensors", "modeling.py", "weights.bin", "original/model.safetensors"):
        (model / name).write_text("{}")
    assert sorted(_content(local_model(url))) == ["config.json", "model.safetensors"]
    assert sorted(_content(local_model(url, weights=False))) == ["config.json"]
    assert "modeling.py" in _content(local_model(url, trust_remote_code=True))
    (model / "config.json").write_text('{"changed": 1}')
    assert _content(local_model(url))["config.json"] == b'{"changed": 1}'
    os.mkfifo(model / "pipe.json")
    with refused("file.unsafe", SecurityError, naming="pipe.json"):
        local_model(url)
