"""Which part of a job a process is, by the variables of each launcher, and what cannot be."""

import zlib

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_simple_launcher_cmd_env

from expertmesh.config import InputError
from expertmesh.distributed.environment import Rank, find_place, hosts_of, join_job
from expertmesh.launcher import launch
from expertmesh.launcher.launch import RunOptions

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
TORCHRUN |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "a", "GROUP_WORLD_SIZE": "2"}
# Task 5 of 8, on the second of two nodes.
SLURM = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
SLURM |= {"SLURM_STEP_NODELIST": "node[07-08]", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_NODEID": "1"}
MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "prterun-a-7@1"}
MPI_HERE = {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
MPI_APART = {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MPI_PORT = 15000 + zlib.crc32(b"prterun-a-7@1") % 16384
PODS = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "4"}
PODS |= {"PET_MASTER_ADDR": "job-master-0", "PET_MASTER_PORT": "23456"}
PYTORCHJOB = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "RANK": "1"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        (TORCHRUN, Rank("torchrun", 5, 8, 1, 4, "10.0.0.1", 29400)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Rank("RANK", 1, 2)),
        # srun: a rank for each task.
        (SLURM, Rank("SLURM", 5, 8, 1, 4, "node07", 15000 + 4711 * 16 % 16384)),
        (SLURM | {"MASTER_ADDR": "head", "MASTER_PORT": "1"}, Rank("SLURM", 5, 8, 1, 4, "head", 1)),
        ({"SLURM_STEP_NODELIST": "n1", "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"},
         Rank("SLURM", 1, 2, 1, 2, "127.0.0.1", 15000)),
        # A batch script, the shell of an allocation, srun --pty, one task: nobody has started ranks.
        ({"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, None),
        (SLURM | {"SLURM_STEP_ID": "4294967290"}, None),
        (SLURM | {"SLURM_PTY_PORT": "40001"}, None),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        # mpirun: a rank for each task.
        (MPI | MPI_HERE, Rank("mpirun", 1, 2, 1, 2, "127.0.0.1", MPI_PORT)),
        (MPI | MPI_APART | {"MASTER_ADDR": "head"}, Rank("mpirun", 1, 2, 0, 1, "head", MPI_PORT)),
        (HYDRA | {"MASTER_PORT": "9"}, Rank("mpirun", 1, 2, 1, 2, "127.0.0.1", 9)),
        (MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, None),
        (SLURM | HYDRA, Rank("SLURM", 5, 8, 1, 4, "node07", 15000 + 4711 * 16 % 16384)),
        (MPI | MPI_HERE | {"RANK": "1", "WORLD_SIZE": "2"}, Rank("RANK", 1, 2)),
        # Launchers inside of tasks.
        (SLURM | TORCHRUN, Rank("torchrun", 5, 8, 1, 4, "10.0.0.1", 29400)),
        (SLURM | {"RANK": "5", "WORLD_SIZE": "8"}, Rank("RANK", 5, 8)),
        # Kubeflow: torchrun in each pod. A PyTorchJob of old has a rank in each.
        (PODS | TORCHRUN, Rank("torchrun", 5, 8, 1, 4, "10.0.0.1", 29400)),
        (PYTORCHJOB | {"WORLD_SIZE": "2"}, Rank("RANK", 1, 2, None, None, "job-master-0", 23456)),
    ],
)  # fmt: skip
def test_a_process_finds_its_place(environment: dict[str, str], place: Rank | None) -> None:
    assert find_place(environment) == place


@pytest.mark.parametrize(
    ("environment", "key", "words"),
    [
        ({"RANK": "0"}, "launch.environment-incomplete", "RANK is 0 in the environment, but WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "launch.environment-incomplete", "WORLD_SIZE is 2 in the environment, but RANK is not"),
        ({"LOCAL_RANK": "0"}, "launch.environment-incomplete", "LOCAL_RANK is 0"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "launch.environment", "RANK is 'one', not a number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "launch.environment-contradicts", "RANK is 2, which cannot be with WORLD_"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "launch.environment-contradicts", "LOCAL_RANK is 4"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "launch.environment-contradicts", "LOCAL_WORLD_SIZE 9"),
        # Exported once by a batch script, so that every task is rank 0; torchrun without --nnodes in every task.
        (SLURM | {"RANK": "0", "WORLD_SIZE": "8"}, "launch.environment-contradicts", "task 5 of the 8 .* RANK 0"),
        (SLURM | TORCHRUN | {"WORLD_SIZE": "4", "RANK": "1", "GROUP_WORLD_SIZE": "1"},
         "launch.environment-contradicts", "task 5 of the 8 .* WORLD_SIZE 4 of torchrun .* --nnodes"),
        (MPI | MPI_HERE | {"RANK": "0", "WORLD_SIZE": "2"}, "launch.environment-contradicts",
         "task 1 of the 2 that mpirun has started, but RANK 0"),
        (MPI | {"OMPI_COMM_WORLD_RANK": "x"}, "launch.environment", "OMPI_COMM_WORLD_RANK is 'x'"),
        (SLURM | {"SLURM_PROCID": "8"}, "launch.environment-contradicts", "SLURM_PROCID is 8"),
        ({name: value for name, value in SLURM.items() if name != "SLURM_LOCALID"},
         "launch.environment-incomplete", "SLURM_LOCALID is not set"),
        (PODS, "launch.start-by-torchrun",
         "start torchrun with the same script, or -m expertmesh with the same arguments"),
        (PODS | PYTORCHJOB | {"WORLD_SIZE": "8"}, "launch.start-by-torchrun", "options of torchrun"),
    ],
)  # fmt: skip
def test_variables_that_contradict_each_other_are_refused(environment: dict[str, str], key: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as refusal:
        find_place(environment)
    assert refusal.value.key == key


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("node[01-03,7],gpu2", ["node01", "node02", "node03", "node7", "gpu2"]),
        ("n1", ["n1"]),
        ("rack[1-2]n[09-10]-ib", ["rack1n09-ib", "rack1n10-ib", "rack2n09-ib", "rack2n10-ib"]),
        ("a,b[3]", ["a", "b3"]),
        ("", []),
    ],
)
def test_nodelists_of_slurm_are_expanded(nodelist: str, hosts: list[str]) -> None:
    assert hosts_of(nodelist) == hosts


def test_a_rank_is_written_into_the_variables_that_torch_reads() -> None:
    environment = dict(SLURM)
    join_job(environment)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert [environment[name] for name in names] == ["5", "8", "1", "4", "node07"]
    alone = {"RANK": "0", "WORLD_SIZE": "1"}
    join_job(alone)
    assert (alone["MASTER_ADDR"], alone["MASTER_PORT"]) == ("127.0.0.1", "0")


def test_ranks_without_a_place_to_meet_are_refused_before_they_wait() -> None:
    for environment, key, word in (
        ({"RANK": "0", "WORLD_SIZE": "2"}, "launch.environment-incomplete", "MASTER_ADDR is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "launch.environment-incomplete", "MASTER_PORT is not"),
        (MPI | MPI_APART, "launch.environment-incomplete", "MASTER_ADDR is not set"),
        (HYDRA, "launch.environment-incomplete", "MASTER_PORT is not set"),
        (PODS, "launch.start-by-torchrun", "options of torchrun"),
        ({}, "launch.no-process-group", "no process group"),
    ):
        with pytest.raises(InputError, match=word) as refusal:
            join_job(dict(environment))
        assert refusal.value.key == key


def test_one_process_of_accelerate_launch_is_told_how_to_start_several() -> None:
    """By the environment that the installed accelerate makes."""
    options = ["--cpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    args = launch_command_parser().parse_args([*options, "--dynamo_backend", "no", "script.py"])
    args.use_cpu, args.num_cpu_threads_per_process = True, 1
    _, environment = prepare_simple_launcher_cmd_env(args)
    with pytest.raises(InputError, match=r"accelerate launch --multi_gpu --num_processes N") as refusal:
        join_job(environment)
    assert refusal.value.key == "launch.no-process-group"


def test_accelerators_that_a_task_of_srun_would_leave_idle_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    step |= {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    with pytest.raises(InputError, match=r"one task .* has 4 accelerators; .*--ntasks-per-node 4") as caught:
        launch.join_job(RunOptions())
    assert caught.value.key == "launch.idle-accelerators"
    with pytest.raises(InputError) as caught:
        launch.join_job(RunOptions(nproc=4))
    assert caught.value.key == "launch.nproc-differs"
