"""A run, its data and its checkpoints on a real S3 server, where moto's and s3fs are installed."""

import hashlib
import importlib.util
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from expertmesh.cli.main import main
from expertmesh.config import Config
from expertmesh.io.storage import Storage
from expertmesh.training.run import train
from tests.support.ranks import run_ranks
from tests.training.tiny_run import run_config, train_steps, weights, write_inputs

MISSING = [name for name in ("moto", "flask", "s3fs") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs moto[server] and s3fs, without {', '.join(MISSING)}")


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (
        pytest.MonkeyPatch.context() as environment,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as started,
    ):
        environment.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        environment.setenv("AWS_ACCESS_KEY_ID", "test")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "test")
        environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
        try:
            _wait_for(port)
            yield
        finally:
            started.kill()


@pytest.fixture
def bucket(server: None) -> str:
    """The name of an empty bucket."""
    name = f"bucket-{uuid.uuid4().hex}"
    _filesystem().mkdir(name)
    return name


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError("moto's server has not started")


def _filesystem() -> Any:
    import s3fs

    return s3fs.S3FileSystem()


def _on_another_machine(first: Config, second: Config) -> list[str]:
    """Two steps on a machine that is lost, the rest on one whose directory is empty; what this rank has uploaded."""
    uploaded: list[str] = []
    put = Storage.put

    def recorded(self: Storage, directory: Path, names: Iterable[str]) -> None:
        names = list(names)
        uploaded.extend(names)
        put(self, directory, names)

    Storage.put = recorded  # type: ignore[method-assign]
    train_steps(first, 2)
    if dist.get_rank() == 0:
        shutil.rmtree(first.output_dir)
    dist.barrier()
    train(second)
    dist.barrier()
    return uploaded


@pytest.mark.slow(why="starts an S3 server, where one is installed; checkpoint/test_remote.py has a store as weak")
@pytest.mark.parametrize("stream", [(), ("data.stream=true", "data.stream_rows=16")], ids=["prepared", "streamed"])
def test_model_data_checkpoints_and_result_on_s3_are_those_of_a_run_on_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: str, stream: tuple[str, ...]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    inputs = write_inputs(tmp_path / "inputs")
    _filesystem().put(str(inputs), f"{bucket}/inputs", recursive=True)
    common = ("checkpoint.every_steps=1", "checkpoint.keep_last=1", "parallel.ep=2", *stream)
    run_ranks(train, 2, run_config(inputs, tmp_path / "whole", *common))
    there = (
        *common,
        f"model.name_or_path=s3://{bucket}/inputs/model",
        f"data.train=[{{path: s3://{bucket}/inputs/train.jsonl}}]",
        f"checkpoint.remote=s3://{bucket}/run",
    )
    first, second = (run_config(inputs, tmp_path / name, *there) for name in ("first", "second"))
    uploaded = run_ranks(_on_another_machine, 2, first, second)
    expected, got = weights(tmp_path / "whole"), weights(tmp_path / "second")
    assert all(torch.equal(tensor, got[name]) for name, tensor in expected.items())
    assert {name for name in uploaded[1] if "-of-00002" in name} == {
        f"{kind}-00001-of-00002.safetensors" for kind in ("model", "optimizer")
    }
    assert "layout.json" in uploaded[0]
    names = _filesystem().find(f"{bucket}/run")
    assert {name.split("/")[3] for name in names if "/checkpoints/" in name} == {"step-00000003"}
    for name, path in ((name, name.removeprefix(f"{bucket}/run/model/")) for name in names if "/model/" in name):
        assert _filesystem().cat_file(name) == (tmp_path / "second" / "model" / path).read_bytes()
    assert main(["inspect", f"s3://{bucket}/run/model"]) == 0
    assert main(["verify", f"s3://{bucket}/run"]) == 0
    assert main(["export", f"s3://{bucket}/run", "--output", str(tmp_path / "exported")]) == 0
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert all(torch.equal(tensor, exported[name]) for name, tensor in expected.items())


@pytest.mark.slow(why="starts an S3 server, where one is installed; checkpoint/test_remote.py has a store as weak")
def test_large_files_go_in_parts_and_those_of_a_killed_upload_do_not_stay(tmp_path: Path, bucket: str) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(101 << 20)  # s3fs divides what is larger than 100 MiB
    storage, there = Storage(f"s3://{bucket}/run"), _filesystem()
    storage.put(tmp_path, ["large"])
    assert there.info(f"{bucket}/run/large")["ETag"].strip('"').endswith("-3")
    (tmp_path / "copy").mkdir()
    digest = hashlib.sha256((tmp_path / "large").read_bytes()).hexdigest()
    assert storage.get(tmp_path / "copy", {"large": 101 << 20}) == {"large": digest}
    for key in ("run/checkpoints/part", "another/part"):
        there.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
    storage.abort_uploads()
    assert [each["Key"] for each in there.list_multipart_uploads(bucket)] == ["another/part"]
