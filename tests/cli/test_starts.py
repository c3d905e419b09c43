"""However a job is started, it is one job: byte for byte the weights of the plain local launch of as many ranks."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from expertmesh.config import load_config
from expertmesh.training.run import train
from tests.cli.jobs import ROOT
from tests.support.ranks import run_ranks
from tests.training.tiny_run import run_config, write_inputs

pytestmark = pytest.mark.timeout(300)  # each starts torch in several new processes
TRAIN = [sys.executable, "-m", "expertmesh", "train"]
# Two network namespaces, joined by a cable, as two machines without a name service; $0 to $2 is what runs in each.
TWO_MACHINES = """
set -e
unshare --net sleep 1000 & other=$!
trap 'kill $other' EXIT
until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.01; done
ip link set lo up
ip link add cable0 type veth peer name cable1 netns $other
ip address add 10.77.0.1/24 dev cable0
ip link set cable0 up
nsenter --net --target $other sh -ec 'ip link set lo up; ip address add 10.77.0.2/24 dev cable1; ip link set cable1 up'
PET_NODE_RANK=0 "$@" & first=$!
PET_NODE_RANK=1 nsenter --net --target $other "$@"
wait $first
"""


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def run_all(commands: Sequence[tuple[list[str], dict[str, str]]], code: int = 0) -> list[str]:
    """What the commands, each with its variables, have printed. They run together, and each has to end with `code`."""
    outside = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME")
    inherited = {name: value for name, value in os.environ.items() if name not in outside}
    inherited |= {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            command, env=inherited | own, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT
        )
        for command, own in commands
    ]
    try:
        said = [process.communicate(timeout=250)[0] for process in started]
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    assert [process.returncode for process in started] == [code] * len(started), "\n\n".join(said)
    return said


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, data, `run.yaml` for two ranks with ep 2, and the weights of the local launch."""
    root = write_inputs(tmp_path_factory.mktemp("starts"))
    run_config(root, root / "run")
    (said,) = run_all([([*TRAIN, *arguments(root, "local"), "--nproc", "2"], {})])
    assert "2 ranks on this machine, each" in said
    assert "warning" not in said
    return root


def arguments(inputs: Path, output: str) -> list[str]:
    return [str(inputs / "run.yaml"), "parallel.ep=2", "parallel.ep_across_nodes=true", f"output_dir={inputs / output}"]


def assert_same(inputs: Path, output: str) -> None:
    ours, local = (inputs / name / "model" / "model.safetensors" for name in (output, "local"))
    assert ours.read_bytes() == local.read_bytes()


def test_srun(inputs: Path) -> None:
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "3", "SLURM_NTASKS": "2", "SLURM_NODEID": "0"}
    step |= {"SLURM_STEP_NODELIST": "node07", "SLURM_STEP_TASKS_PER_NODE": "2"}
    command = [*TRAIN, *arguments(inputs, "srun")]
    first, second = run_all([(command, step | {"SLURM_PROCID": n, "SLURM_LOCALID": n}) for n in "01"])
    assert first.startswith("starting   rank 0 of 2 that SLURM has started: ")
    assert "network" not in first
    assert "step 3/3" not in second
    assert_same(inputs, "srun")


def test_pods_of_kubeflow_on_two_machines_without_names(inputs: Path) -> None:
    """Left alone, gloo announces on each machine what its name stands for there: nothing that the other can reach."""
    tools = [shutil.which(tool) for tool in ("unshare", "nsenter", "ip", "sh")]
    namespaces = ["unshare", "--user", "--map-root-user", "--net"]
    if not all(tools) or subprocess.run([*namespaces, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to create network namespaces, and the commands unshare, nsenter and ip")
    pods = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "10.77.0.1", "PET_MASTER_PORT": "23456"}
    command = [*TRAIN, *arguments(inputs, "pods")]
    command += ["distributed.timeout_seconds=30", "distributed.first_step_timeout_seconds=60"]
    (said,) = run_all([([*namespaces, "sh", "-c", TWO_MACHINES, "two-machines", *command], pods)])
    assert "1 rank on this machine (node 0 of 2, 10.77.0.1:23456), each" in said
    assert "starting   network interface cable0 (10.77.0.1), on the route to 10.77.0.1\n" in said
    assert "layout     ep 2 crosses the borders of nodes of 1 ranks in 1 of its 1 groups (ranks 0 to 1)" in said
    assert_same(inputs, "pods")


@pytest.mark.parametrize("local", [{}, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}])
def test_pods_of_a_pytorchjob_with_a_rank_each(inputs: Path, local: dict[str, str]) -> None:
    pods = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()} | local
    command = [*TRAIN, *arguments(inputs, f"pytorchjob-{len(local)}")]
    run_all([(command, pods | {"RANK": rank}) for rank in "01"])
    assert_same(inputs, f"pytorchjob-{len(local)}")


def test_two_agents_of_torchrun(inputs: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "-m", "expertmesh", "train"]
    run_all([([*torchrun, *arguments(inputs, "agents")], {})] * 2)
    assert_same(inputs, "agents")


def test_a_refusal_under_torchrun_is_said_once(inputs: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "expertmesh", "train"]
    (said,) = run_all([([*torchrun, *arguments(inputs, "refused"), "parallel.ep=3"], {})], code=1)
    assert said.count("error: rank ") == 1
    assert "traceback : parallel.ep 3 does not divide" in said  # torchrun's own summary


def test_a_process_group_that_is_up(inputs: Path) -> None:
    """What Ray's TorchTrainer gives its workers."""
    run_ranks(train, 2, load_config(inputs / "run.yaml", ["parallel.ep=2", f"output_dir={inputs / 'group'}"]))
    assert_same(inputs, "group")


RAY = """
import sys
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

def rank(arguments):
    from expertmesh.cli.main import main
    assert main(["train", *arguments["arguments"]]) == 0

ray.init(num_cpus=2, include_dashboard=False)
run_config = RunConfig(storage_path=sys.argv[1])
loop = {"arguments": sys.argv[2:]}
TorchTrainer(rank, train_loop_config=loop, scaling_config=ScalingConfig(num_workers=2), run_config=run_config).fit()
"""


def test_ray(inputs: Path) -> None:
    pytest.importorskip("ray.train", reason="needs ray[train]")
    run_all([([sys.executable, "-c", RAY, str(inputs / "storage"), *arguments(inputs, "ray")], {})])
    assert_same(inputs, "ray")


def test_launchers_that_start_other_numbers_of_ranks_do_not_start_any(inputs: Path) -> None:
    pods = {"PET_NNODES": "2", "PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": free_port()}
    command = [*TRAIN, *arguments(inputs, "uneven"), "parallel.ep=1", "train.global_batch_size=12", "--nproc"]
    for said in run_all([([*command, ranks], pods | {"PET_NODE_RANK": node}) for node, ranks in ("01", "12")], code=2):
        assert "error: the machines of this job start 1, 2 ranks; start the same number on each (--nproc, " in said
    assert not (inputs / "uneven").exists()
