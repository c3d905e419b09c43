"""Find out which part of a job this process is, from the environment variables of its launcher, and by which network
interface it reaches the others. No torch, no collective.

Three launchers are understood. RANK, WORLD_SIZE and related variables (torchrun, Ray, our own launcher) make this
process one rank. So do the SLURM_* variables of a step that srun has started with several tasks, and the variables of
mpirun. Variables that contradict each other are refused by name: a job that is joined wrongly waits, or silently
becomes several jobs. So are the PET_* variables of Kubeflow without torchrun, whose options they are.

Ranks on several machines announce the network interface on the route to MASTER_ADDR. Otherwise gloo announces the
address of the host's name; on many machines that is 127.0.0.1, and the other ranks wait without end.
"""

import array
import ipaddress
import itertools
import os
import re
import socket
import struct
import sys
import time
import zlib
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path

from expertmesh.config.errors import DistributedFailure, InputError

Environment = MutableMapping[str, str]
LOCALHOST = "127.0.0.1"
# Step numbers from here on are no steps: a batch script, the shell of an allocation.
_SPECIAL_STEPS = 0xFFFFFFF0
# Rank, size, local rank, local size: of Open MPI, and of Hydra (MPICH, Intel MPI).
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
# Reserved for documentation: whatever is routed there takes the default route.
_OVER_DEFAULT_ROUTE = ("198.51.100.1", "2001:db8::1")
_SIOCGIFCONF, _IFREQ_BYTES = 0x8912, 40
_NCCL_SETTINGS = (Path("/etc/nccl.conf"), Path("~/.nccl.conf"))


@dataclass(frozen=True, slots=True)
class Rank:
    """This process is one rank of a job. A field is None if the launcher did not give it."""

    starter: str
    """Name of the launcher."""
    rank: int
    """The number of this rank in the job."""
    world_size: int
    """The number of ranks in the job."""
    local_rank: int | None = None
    """The number of this rank on its machine."""
    local_world_size: int | None = None
    """The number of ranks on its machine."""
    address: str | None = None
    """Address of the rendezvous."""
    port: int | None = None
    """Port of the rendezvous."""

    def export(self, environment: Environment = os.environ) -> None:
        """Write this rank into the variables that torch reads."""
        values = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
        }
        environment.update({name: str(value) for name, value in values.items() if value is not None})


def find_place(environment: Environment = os.environ) -> Rank | None:
    """Return the place of this process in a job that a launcher has started, or None if there is no such job.

    Raises:
        InputError: The variables contradict each other, or torchrun has to start the ranks.
    """
    alone = not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} & environment.keys()
    if alone and ("PET_NNODES" in environment or "PET_NODE_RANK" in environment):
        raise InputError(
            "PET_NNODES and PET_NODE_RANK are options of torchrun, which starts the ranks of each machine; start "
            "torchrun with the same script, or -m expertmesh with the same arguments; for a verb that starts no ranks "
            "unset them",
            key="launch.start-by-torchrun",
        )
    task = _slurm_task(environment) or _mpi_rank(environment)
    if "RANK" in environment or "WORLD_SIZE" in environment or "LOCAL_RANK" in environment:
        found = _torch_rank(environment)
        if task is not None:
            _refuse_other_job(found, task, environment)
        return found
    return task


def join_job(environment: Environment = os.environ) -> None:
    """Make this process the rank that its environment names, for torch's `env://`. Raises `InputError` without one."""
    place = find_place(environment)
    if place is None:
        start = "start with torchrun, srun or expertmesh train, or call init_process_group first"
        if "ACCELERATE_MIXED_PRECISION" in environment:  # each of its launchers sets it
            start = (
                "accelerate launch has started this process alone, as it does on CPUs whatever --num_processes says; "
                "start with torchrun --nproc-per-node N, or with accelerate launch --multi_gpu --num_processes N, "
                "which starts N on CPUs too if --cpu is left out"
            )
        raise InputError(f"no process group; {start}", key="launch.no-process-group")
    if place.world_size == 1:
        place = replace(place, address=place.address or LOCALHOST, port=place.port or 0)
    for name, what, found in (("MASTER_ADDR", "host", place.address), ("MASTER_PORT", "port", place.port)):
        if found is None:
            raise InputError(
                f"{name} is not set, so {place.world_size} ranks cannot meet; set it to the {what} of rank 0, the same "
                "on every machine",
                key="launch.environment-incomplete",
            )
    place.export(environment)


def hosts_of(nodelist: str) -> list[str]:
    """Expand SLURM's short form of hosts: `node[01-03,7],gpu2` is node01, node02, node03, node7, gpu2."""
    hosts: list[str] = []
    for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        parts = re.split(r"\[([^\]]*)\]", word)  # text and what is in brackets, in turn
        choices = [list(_numbers(part)) if place % 2 else [part] for place, part in enumerate(parts)]
        hosts += ["".join(choice) for choice in itertools.product(*choices)]
    return hosts


def _numbers(ranges: str) -> Iterator[str]:
    for each in ranges.split(","):
        first, _, last = each.partition("-")
        yield from (str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1))


def _torch_rank(environment: Environment) -> Rank:
    for name in ("RANK", "WORLD_SIZE"):
        if name not in environment:
            given = next(name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in environment)
            raise InputError(
                f"{given} is {environment[given]} in the environment, but {name} is not set; set both, or unset "
                f"{given} to start ranks on this machine",
                key="launch.environment-incomplete",
            )
    names = {"rank": "RANK", "world_size": "WORLD_SIZE", "local_rank": "LOCAL_RANK"}
    names |= {"local_world_size": "LOCAL_WORLD_SIZE", "port": "MASTER_PORT"}
    numbers = {field: _number(environment, name) for field, name in names.items() if name in environment}
    starter = "torchrun" if "TORCHELASTIC_RUN_ID" in environment else "RANK"
    found = Rank(starter, **numbers, address=environment.get("MASTER_ADDR"))
    local, here = found.local_rank, found.local_world_size
    for small, large, wrong in (
        ("RANK", "WORLD_SIZE", found.rank >= found.world_size),
        ("LOCAL_RANK", "LOCAL_WORLD_SIZE", local is not None and here is not None and local >= here),
        ("WORLD_SIZE", "LOCAL_WORLD_SIZE", here is not None and found.world_size < here),
    ):
        if wrong:
            raise InputError(
                f"{small} is {environment[small]}, which cannot be with {large} {environment[large]} in the "
                "environment; set both as the launcher should have, or unset them",
                key="launch.environment-contradicts",
            )
    return found


def _slurm_task(environment: Environment) -> Rank | None:
    """Return the task of a step with several. A batch script or an interactive shell starts ranks by itself."""
    step = environment.get("SLURM_STEP_ID", "0" if "SLURM_STEP_NODELIST" in environment else str(_SPECIAL_STEPS))
    if not step.isdigit() or int(step) >= _SPECIAL_STEPS or "SLURM_PTY_PORT" in environment:
        return None
    count = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    tasks = _number(environment, count, "1")
    if tasks == 1:
        return None
    rank, job = _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_JOB_ID", "0")
    if rank >= tasks:
        raise InputError(
            f"SLURM_PROCID is {rank}, which cannot be with {count} {tasks} in the environment; unset SLURM's "
            "variables, or start the ranks with srun",
            key="launch.environment-contradicts",
        )
    hosts = hosts_of(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", ""))
    here = tasks if len(hosts) == 1 else _tasks_here(environment)
    first = LOCALHOST if len(hosts) == 1 else hosts[0] if hosts else None
    port = _port(job * 16 + int(step))
    return Rank(
        "SLURM",
        rank,
        tasks,
        _number(environment, "SLURM_LOCALID"),
        here,
        environment.get("MASTER_ADDR", first),
        _number(environment, "MASTER_PORT", str(port)),
    )


def _mpi_rank(environment: Environment) -> Rank | None:
    """Return the rank that mpirun has started beside others. A single one starts ranks by itself."""
    names = next((names for names in _MPI if names[0] in environment and names[1] in environment), None)
    if names is None:
        return None
    rank, size = (_number(environment, name) for name in names[:2])
    if size == 1:
        return None
    local, here = (_number(environment, name) if name in environment else None for name in names[2:])
    first = LOCALHOST if here == size else None
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid")
    port = None if job is None else _port(zlib.crc32(job.encode()))
    if "MASTER_PORT" in environment:
        port = _number(environment, "MASTER_PORT")
    return Rank("mpirun", rank, size, local, here, environment.get("MASTER_ADDR", first), port)


def _port(job: int) -> int:
    """Derive a port, equal for all ranks of a job, another for other jobs, below those that systems assign."""
    return 15000 + job % 16384


def _tasks_here(environment: Environment) -> int | None:
    """Return how many tasks are on this node, from SLURM's `2(x3),1`: two on each of three nodes, one on a fourth."""
    nodes: list[int] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "")):
        nodes += [int(tasks)] * int(times or 1)
    node = _number(environment, "SLURM_NODEID", "0")
    return nodes[node] if node < len(nodes) else None


def _refuse_other_job(found: Rank, task: Rank, environment: Environment) -> None:
    """Refuse ranks that are plainly not one job over all tasks. Launchers inside a task may number as they like."""
    slurm = task.starter == "SLURM"
    if found.starter == "torchrun":
        wrong = environment.get("GROUP_WORLD_SIZE") == "1"
        how = "give torchrun --nnodes, --rdzv-backend c10d and --rdzv-endpoint"
    else:
        wrong = found.local_rank is None and (found.rank, found.world_size) != (task.rank, task.world_size)
        how = f"unset RANK and WORLD_SIZE, which {'SLURM' if slurm else 'mpirun'}'s variables say"
    if wrong:
        by, one = ("srun has started", "srun -n 1") if slurm else ("mpirun has started", "mpirun -n 1")
        raise InputError(
            f"this is task {task.rank} of the {task.world_size} that {by}, but RANK {found.rank} and "
            f"WORLD_SIZE {found.world_size} of {found.starter} say another job; {how}, or start one task ({one})",
            key="launch.environment-contradicts",
        )


def local_world_sizes_differ(what: str, mend: str) -> InputError:
    """Return the error for nodes with different numbers of ranks where they have to be equal."""
    return InputError(
        f"{what}, as not every node has as many ranks (LOCAL_WORLD_SIZE); {mend}", key="launch.local-world-sizes-differ"
    )


def too_few_accelerators(what: str, count: int, otherwise: str = "") -> InputError:
    """Return the error for more ranks than the `count` accelerators that are seen here."""
    return InputError(
        f"{what}, but there are {count} accelerators here; start at most {count} ranks{otherwise}",
        key="launch.too-few-accelerators",
    )


def _number(environment: Environment, name: str, default: str | None = None) -> int:
    text = environment.get(name, default)
    if text is None:
        raise InputError(
            f"the environment variable {name} is not set, unlike others of its launcher; set it, or unset them",
            key="launch.environment-incomplete",
        )
    if not text.isdecimal():
        raise InputError(
            f"the environment variable {name} is {text!r}, not a number; mend it or unset it", key="launch.environment"
        )
    return int(text)


def processors() -> int:
    """Return the processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_interface(timeout_seconds: float) -> str | None:
    """Let gloo and NCCL use the interface on the route to MASTER_ADDR, unless the user has named one.

    Call it before a rank's process group starts. gloo's ranks on one machine listen on the loopback interface alone.

    Returns:
        The decision for several machines, as a sentence.

    Raises:
        DistributedFailure: MASTER_ADDR has had no address for `timeout_seconds`.
    """
    master, here = os.environ["MASTER_ADDR"], os.environ.get("LOCAL_WORLD_SIZE")
    if GLOO in os.environ:
        return None
    if here == os.environ["WORLD_SIZE"]:
        if loopback := _interface_of(ipaddress.ip_address("127.0.0.1")):
            os.environ[GLOO] = loopback
        return None
    address = _own_address(master, timeout_seconds)
    name = None if address is None else _interface_of(address)
    if name is None:
        return (
            f"network interface left to torch, as none has {address or 'a route'} to {master}; set {GLOO} if ranks wait"
        )
    os.environ[GLOO] = name
    if NCCL not in os.environ and not any(_names_interface(path) for path in _NCCL_SETTINGS):
        os.environ[NCCL] = f"={name}"  # not a prefix of names
    return f"network interface {name} ({address}), on the route to {master}"


def _own_address(master: str, timeout_seconds: float) -> Address | None:
    """Return the address of this machine, as other machines reach it.

    The host's name may stand for a loopback address on the host itself; others reach the host over its default route,
    or over its only other interface.
    """
    addresses = _resolve(master, timeout_seconds)
    own = next((found for each in addresses if (found := _route_to(each))), None)
    if own is None or not own.is_loopback or master == "localhost" or _is_address(master):
        return own
    routed = next((found for each in _OVER_DEFAULT_ROUTE if (found := _route_to(each))), None)
    others = [each for _, each in _interfaces() if not each.is_loopback and not each.is_link_local]
    return routed or (others[0] if len(others) == 1 else own)


def _resolve(host: str, timeout_seconds: float) -> list[str]:
    """Return the addresses of `host`, and wait for them: a name service may know the first machine last."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            return [str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)]
        except socket.gaierror as error:
            if time.monotonic() >= deadline:
                raise DistributedFailure(
                    f"MASTER_ADDR is {host}, a name without an address on this machine ({error.strerror}); set it to "
                    "an address of rank 0's machine, or mend the name service",
                    key="launch.unknown-host",
                ) from error
        time.sleep(1)


def _route_to(address: str) -> Address | None:
    """Return this machine's address on the route to `address`, or None if there is no route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError:
        return None


def _interface_of(address: Address) -> str | None:
    if address.is_loopback:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    return next((name for name, found in _interfaces() if found == address), None)


def _interfaces() -> Iterator[tuple[str, Address]]:
    """Return the names of interfaces with their addresses on Linux; nothing on other systems."""
    if sys.platform != "linux":
        return
    import fcntl

    buffer = array.array("B", bytes(1024 * _IFREQ_BYTES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
        length, _ = struct.unpack("iL", fcntl.ioctl(probe, _SIOCGIFCONF, request))
    for start in range(0, length, _IFREQ_BYTES):
        label = buffer[start : start + 16].tobytes().partition(b"\0")[0].decode()
        name = label.partition(":")[0]  # of a second address, `eth0:1`
        yield name, ipaddress.IPv4Address(buffer[start + 20 : start + 24].tobytes())
    if (table := Path("/proc/net/if_inet6")).exists():
        for line in table.read_text(encoding="utf-8").splitlines():
            digits, *_, name = line.split()
            yield name, ipaddress.IPv6Address(bytes.fromhex(digits))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _names_interface(settings: Path) -> bool:
    """Return whether a file of NCCL's names an interface, which the environment would override."""
    try:
        return NCCL in settings.expanduser().read_text(errors="replace")
    except OSError:
        return False
