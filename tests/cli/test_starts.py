"""However a job is started, it is one job: byte for byte the weights of the plain local launch of as many ranks."""

import argparse
import contextlib
import getpass
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from expertmesh.config import load_config
from expertmesh.training.run import train
from tests.cli.jobs import ROOT, free_port, wait_until
from tests.support.ranks import shared_ranks
from tests.training.tiny_run import run_config, write_inputs

TRAIN = [sys.executable, "-m", "expertmesh", "train"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
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
        said = [process.communicate()[0] for process in started]
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


CLUSTERS = ROOT / "examples" / "clusters"
# What srun sets for the tasks of a step, on two nodes of one task or on one of two; $SLURM_TASKS is theirs.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=node07 SLURM_STEP_TASKS_PER_NODE=2 SLURM_NODEID=0
for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=$task "$@" > "$SAID-$task" 2>&1 & tasks+=($!); done
for task in "${tasks[@]}"; do wait "$task"; done
"""


@pytest.fixture
def commands(tmp_path: Path) -> dict[str, str]:
    """Variables under which `expertmesh` is this one, `torchrun` this torch's, and `srun` the one above."""
    (tmp_path / "srun").write_text(SRUN)
    for name, module in (("expertmesh", "expertmesh"), ("torchrun", "torch.distributed.run")):
        (tmp_path / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
    for name in ("srun", "expertmesh", "torchrun"):
        (tmp_path / name).chmod(0o755)
    return {"PATH": os.pathsep.join([str(tmp_path), os.environ["PATH"]]), "SAID": str(tmp_path / "said")}


@pytest.mark.slow(why="starts processes; test_verify.py starts ranks by the command line")
def test_srun(inputs: Path, commands: dict[str, str]) -> None:
    """By the batch script of the examples. The step has its own variables, and those of the job."""
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "node07"}
    script = str(CLUSTERS / "task-per-device.sbatch")
    run_all([(["bash", script, *arguments(inputs, "srun")], commands | job)])
    first, second = (Path(f"{commands['SAID']}-{task}").read_text() for task in range(2))
    assert first.startswith("starting   rank 0 of 2 that SLURM has started: ")
    assert "network" not in first
    assert "step 3/3" not in second
    assert_same(inputs, "srun")


NODES = ("first", "second")
# Of the examples, for nodes of one core: no GPU, one rank each.
SMALLER = [
    ("#SBATCH --(gpus-per-node|exclusive).*\n", ""),
    ("--nodes=4", "--nodes=2"),
    ("(-per-node|-per-task)=\\d+", r"\1=1"),
    ("--nproc-per-node 8", "--nproc-per-node 1"),
]
# A cluster of two nodes, both of which are this machine.
SLURM_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={root}/munge.socket
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/%n
SlurmctldPidFile={root}/controller.pid
SlurmdPidFile={root}/%n.pid
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
ReturnToService=2
NodeName=first NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus}
NodeName=second NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus}
PartitionName=all Nodes=ALL Default=YES OverSubscribe=YES:4
"""


@pytest.fixture
def slurm(tmp_path: Path, commands: dict[str, str]) -> Iterator[dict[str, str]]:
    """Variables with which `sbatch` reaches the cluster."""
    everywhere = f"{os.environ['PATH']}:/usr/sbin"
    munged, controller, node, sbatch = (
        shutil.which(tool, path=everywhere) for tool in ("munged", "slurmctld", "slurmd", "sbatch")
    )
    if not (munged and controller and node and sbatch):
        pytest.skip("needs SLURM (slurmctld, slurmd, sbatch) and munged")
    (tmp_path / "srun").unlink()  # the one above
    for name in ("state", "first", "second"):
        (tmp_path / name).mkdir()
    settings = {"host": socket.gethostname().split(".")[0], "user": getpass.getuser(), "cpus": os.cpu_count()}
    conf, key = tmp_path / "slurm.conf", tmp_path / "munge.key"
    conf.write_text(SLURM_CONF.format(root=tmp_path, ports=[free_port() for _ in range(3)], **settings))
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    files = {"key-file": key, "socket": tmp_path / "munge.socket"}
    files |= {f"{kind}-file": tmp_path / f"munge.{kind}" for kind in ("pid", "seed", "log")}
    daemons = [[munged, "--foreground", "--force", *(f"--{name}={path}" for name, path in files.items())]]
    daemons += [[controller, "-D", "-f", str(conf)], *([node, "-D", "-f", str(conf), "-N", n] for n in NODES)]
    own = os.environ | commands | {"SLURM_CONF": str(conf)}
    with ExitStack() as stack, (tmp_path / "slurm.log").open("w") as log:
        for daemon in daemons:
            process = stack.enter_context(subprocess.Popen(daemon, env=own, stdout=log, stderr=log))
            stack.callback(process.terminate)
            wait_until(files["socket"].exists)
        yield {"SLURM_CONF": str(conf), "MASTER_ADDR": "127.0.0.1"} | commands


@pytest.mark.slow(why="starts SLURM's daemons; test_srun has the variables")
@pytest.mark.parametrize("script", ["task-per-device", "task-per-node"])
def test_the_batch_scripts_under_slurm_itself(inputs: Path, slurm: dict[str, str], tmp_path: Path, script: str) -> None:
    text = (CLUSTERS / f"{script}.sbatch").read_text()
    for there, here in SMALLER:
        text = re.sub(there, here, text)
    (tmp_path / "job.sbatch").write_text(text)
    command = ["sbatch", "--wait", f"--output={tmp_path}/said", str(tmp_path / "job.sbatch")]
    run_all([([*command, *arguments(inputs, script)], slurm)])
    said = (tmp_path / "said").read_text()
    assert "ranks      2 × " in said, said
    assert "1 on each of 2 machines" in said, said
    assert_same(inputs, script)


@pytest.mark.slow(why="srun joins by the same variables of torch")
def test_pods_of_kubeflow_on_two_machines_without_names(inputs: Path) -> None:
    """Left alone, gloo announces on each machine what its name stands for there: nothing that the other can reach."""
    tools = [shutil.which(tool) for tool in ("unshare", "nsenter", "ip", "sh")]
    namespaces = ["unshare", "--user", "--map-root-user", "--net"]
    if not all(tools) or subprocess.run([*namespaces, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to create network namespaces, and the commands unshare, nsenter and ip")
    pods = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "10.77.0.1", "PET_MASTER_PORT": "23456"}
    command = [*TORCHRUN, "-m", "expertmesh", "train", *arguments(inputs, "pods")]
    command += ["distributed.timeout_seconds=300", "distributed.first_step_timeout_seconds=300"]
    (said,) = run_all([([*namespaces, "sh", "-c", TWO_MACHINES, "two-machines", *command], pods)])
    assert "starting   rank 0 of 2 that torchrun has started: " in said
    assert "starting   network interface cable0 (10.77.0.1), on the route to 10.77.0.1\n" in said
    assert "layout     ep 2 crosses the borders of nodes of 1 ranks in 1 of its 1 groups (ranks 0 to 1)" in said
    assert_same(inputs, "pods")


@pytest.mark.slow(why="srun joins by the same variables of torch")
@pytest.mark.parametrize("local", [{}, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}])
def test_pods_of_a_pytorchjob_with_a_rank_each(inputs: Path, local: dict[str, str]) -> None:
    pods = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())} | local
    command = [*TRAIN, *arguments(inputs, f"pytorchjob-{len(local)}")]
    run_all([(command, pods | {"RANK": rank}) for rank in "01"])
    assert_same(inputs, f"pytorchjob-{len(local)}")


@pytest.mark.slow(why="a launch of four processes")
@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_two_agents_of_torchrun(inputs: Path, commands: dict[str, str], rendezvous: str) -> None:
    """By the script of the examples, as a node where nothing is elastic, and by torchrun's own rendezvous."""
    said = [f"output_dir={inputs / rendezvous}" if "output_dir" in each else each for each in arguments(inputs, "")]
    if rendezvous == "static":
        script = ["bash", str(CLUSTERS / "torchrun.sh"), *said]
        own = commands | {"HOST": "localhost", "NODES": "2", "DEVICES": "1"}
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 29500)) == 0:
                pytest.skip("torchrun's usual port, which the script takes, is in use on this machine")
        run_all([(script, own | {"NODE_RANK": node}) for node in "01"])
    else:
        torchrun = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1"]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "-m", "expertmesh"]
        run_all([([*torchrun, "train", *said], {})] * 2)
    assert_same(inputs, rendezvous)


@pytest.mark.slow(why="a launch of three processes; test_failures.py has it without one")
def test_a_refusal_under_torchrun_is_said_once_and_its_restarts_do_not_try_it_again(inputs: Path) -> None:
    torchrun = [*TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "2"]
    torchrun += ["--master-port", str(free_port()), "-m", "expertmesh", "train"]
    (said,) = run_all([([*torchrun, *arguments(inputs, "refused"), "parallel.ep=3"], {})], code=1)
    assert len(re.findall(r"error: rank \d: parallel.ep 3 does not divide", said)) == 1
    assert said.count("building the model on meta") == 1
    assert said.count(": not tried again (attempt ") == 3  # by one rank in each attempt, and in torchrun's summary
    assert "traceback : not tried again (attempt 3): parallel.ep 3 does not divide" in said


@pytest.mark.slow(why="starts processes; test_verify.py starts ranks by the command line")
def test_a_process_group_that_is_up(inputs: Path) -> None:
    """What Ray's TorchTrainer gives its workers."""
    shared_ranks(train, 2, load_config(inputs / "run.yaml", ["parallel.ep=2", f"output_dir={inputs / 'group'}"]))
    assert_same(inputs, "group")


RAY = """
import sys
import ray
sys.path.append(sys.argv[1])
from ray_train import train
ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": sys.argv[4]}})
train(sys.argv[5:], 2, storage_path=sys.argv[2], name=sys.argv[3])
"""


@pytest.mark.slow(why="a launch of Ray, where it is installed")
def test_ray(inputs: Path, tmp_path: Path) -> None:
    """By the script of the examples."""
    pytest.importorskip("ray.train", reason="needs ray[train]")
    paths = os.pathsep.join([str(CLUSTERS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    wanted = [*arguments(inputs, "ray"), "checkpoint.every_steps=1", "train.max_steps=3"]
    command = [sys.executable, "-c", RAY, str(CLUSTERS), str(tmp_path), "ray", paths, *wanted]
    # Ray gives up waiting for its own workers after 30 s, and then waits for others.
    run_all([(command, {"PYTHONPATH": paths, "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "400"})])
    assert_same(inputs, "ray")


def _pods(name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The container of a manifest of the examples, and the variables that it sets to fixed values."""
    manifest = yaml.safe_load((CLUSTERS / f"{name}.yaml").read_text())
    assert manifest["apiVersion"] == VERSIONS[name]
    spec = manifest["spec"]
    if name == "trainjob":
        return spec["trainer"], {"PET_NPROC_PER_NODE": str(spec["trainer"]["numProcPerNode"])}
    if name == "pytorchjob":
        master, workers = (spec["pytorchReplicaSpecs"][kind] for kind in ("Master", "Worker"))
        assert master | {"replicas": 3} == workers
        (container,) = master["template"]["spec"]["containers"]
        return container, {"PET_NPROC_PER_NODE": spec["nprocPerNode"]}
    job = spec["replicatedJobs"][0]["template"]["spec"]
    assert (job["completionMode"], job["completions"]) == ("Indexed", job["parallelism"])
    (container,) = job["template"]["spec"]["containers"]
    assert container["env"][3]["value"] == f"{manifest['metadata']['name']}-node-0-0.{manifest['metadata']['name']}"
    return container, {each["name"]: each["value"] for each in container["env"] if "value" in each}


# All of each manifest has been compared with the published definition of its kind, unknown fields refused.
VERSIONS = {
    "trainjob": "trainer.kubeflow.org/v1alpha1",
    "pytorchjob": "kubeflow.org/v1",
    "jobset": "jobset.x-k8s.io/v1alpha2",
}


@pytest.mark.parametrize("name", VERSIONS)
def test_a_pod_of_each_manifest_is_a_node_of_torchrun(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    container, own = _pods(name)
    operator = {"PET_NNODES": "4", "PET_NODE_RANK": "2"}
    node = _node(container["command"], operator | own, monkeypatch)
    assert (node.node_rank, node.nnodes, node.nproc_per_node) == (2, "4", "8")
    (limits,) = (container[key]["limits"] for key in ("resources", "resourcesPerNode") if key in container)
    assert limits == {"nvidia.com/gpu": int(node.nproc_per_node)}


def _node(command: list[str], variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Return what torchrun reads from a command and its variables."""
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert command[0] == "torchrun"
    found: argparse.Namespace = get_args_parser().parse_args(command[1:])
    assert [found.module, found.training_script, *found.training_script_args] == [
        *(True, "expertmesh", "train", "/work/config.yaml"),
    ]
    return found


def test_a_task_of_skypilot_is_a_node_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    task = yaml.safe_load((CLUSTERS / "skypilot.yaml").read_text())
    *exports, command = task["run"].strip().splitlines()
    sky = {"SKYPILOT_NUM_NODES": str(task["num_nodes"]), "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    sky |= {"SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8", "PATH": os.environ["PATH"]}
    script = "\n".join([*exports, "env"])
    said = subprocess.run(["bash", "-ec", script], env=sky, capture_output=True, text=True, check=True).stdout
    variables = dict(line.split("=", 1) for line in said.splitlines() if line.startswith("PET_"))
    node = _node(command.split(), variables, monkeypatch)
    assert (node.node_rank, node.nnodes, node.nproc_per_node) == (1, "4", "8")
    assert (node.master_addr, node.master_port) == ("10.0.0.7", 29500)
