"""`expertmesh doctor`: report whether this machine can train, and what a bug report has to say about it.

Looks at versions, devices, disk, hub and limits, and ends with torch's own report (`torch.utils.collect_env`).
Prints one block to copy, without secrets. Downloads nothing and leaves nothing behind.
"""

import json
import os
import re
import resource
import shutil
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

import torch
from huggingface_hub import constants, get_token
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from torch.utils.collect_env import get_pretty_env_info

from expertmesh.config.errors import InputError
from expertmesh.io.directory import sync
from expertmesh.io.terminal import bytes_text, printable
from expertmesh.planning.forecast import devices_here, host_memory
from expertmesh.training.lock import RunLock
from expertmesh.training.reporting.start import device_name, versions

HIDDEN = "***"
# What decides where ranks meet, what they compute on and what they download.
_TELLING = re.compile(
    r"(NCCL|GLOO|PYTORCH|CUDA|HIP|ROCR|ASCEND|HF|HUGGING_?FACE|TRANSFORMERS|OMP|PET|OMPI_COMM_WORLD|PMI)_\w+|TORCH\w+"
    r"|(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|SLURM_(JOB_ID|NNODES|NTASKS|PROCID|LOCALID|STEP_ID|STEP_NODELIST)"
    r"|(https?|no|all)_proxy",
    re.IGNORECASE,
)
_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASS|AUTH|CRED", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"(?<=//)[^/@\s]+(?=@)|\bhf_\w{6,}|(?<=Bearer )\S+")

_FOR_DEVELOPERS = 'extra == "dev"'
OPEN_FILES = 1024
# What NCCL takes of /dev/shm grows with the devices; the 64 MiB of a container by default are too few for two.
SHARED_MEMORY = 2**30
_DEVICE_FILES = ("/dev/nvidia0", "/dev/kfd", "/dev/davinci0", "/dev/accel/accel0")
FREE_BYTES = 2**30
HUB_SECONDS = 5.0
_INDENT = " " * 11


@dataclass(frozen=True, slots=True)
class ReportLine:
    """A line of the report."""

    what: str
    says: str
    faults: tuple[str, ...] = ()
    """A sentence for each thing that has to be mended."""


def run(output: str, as_json: bool = False) -> int:
    """Print what is found; returns 0. Raises `InputError` with a sentence for each fault."""
    findings: list[ReportLine] = []
    for look in (packages, devices, partial(disk, Path(output).absolute()), hub, limits, environment):
        findings.append(found := look())
        if not as_json:
            text = printable(found.says).replace("\n", f"\n{_INDENT}")
            print(f"{found.what:<{len(_INDENT)}}{text}", flush=True)
    faults = [fault for finding in findings for fault in finding.faults]
    of_torch = without_secrets(get_pretty_env_info())
    if as_json:
        found_here = {each.what: each.says for each in findings}
        print(json.dumps({"found": {**found_here, "torch": of_torch}, "faults": faults}, indent=2))
    else:
        print(f"\n{printable(of_torch)}\n")
    if faults:
        raise InputError("\n".join(faults), key="doctor.faults")
    if not as_json:
        print("no fault found")
    return 0


def packages() -> ReportLine:
    """Compare the installed packages with the versions that expertmesh is tested with."""
    lines, faults = [f"{name} {number}" for name, number in versions().items()], []
    python = SpecifierSet(metadata("expertmesh")["Requires-Python"])
    if not python.contains(versions()["python"], prereleases=True):
        faults.append(f"python {versions()['python']} is not {python}; make an environment with another one")
    for requirement in map(Requirement, requires("expertmesh") or ()):
        if _FOR_DEVELOPERS in str(requirement.marker):
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            continue  # optional; of the others, this command itself would not run without
        fits = requirement.specifier.contains(installed, prereleases=True)
        if requirement.marker is None and not fits:
            faults.append(
                f"{requirement.name} {installed} is outside of {requirement.specifier}, which expertmesh is tested "
                f"with; pip install '{requirement.name}{requirement.specifier}'"
            )
        if requirement.name not in versions():
            lines.append(f"{requirement.name} {installed}{'' if fits else f' (not {requirement.specifier})'}")
    return ReportLine("packages", ", ".join(dict.fromkeys(lines)), tuple(faults))


def devices() -> ReportLine:
    """Report the accelerators that torch sees, or the processor, with what training cannot use of them."""
    system = f"{sys.platform}, {bytes_text(host_memory())} of memory"
    here = next((file for file in _DEVICE_FILES if Path(file).exists()), None)
    if not torch.accelerator.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no accelerator"
        unseen = (
            f"{here} is there, but torch {torch.__version__} (built for {built}) sees no device; install a torch that "
            "fits the driver, or check CUDA_VISIBLE_DEVICES"
        )
        return ReportLine("devices", f"{device_name(torch.device('cpu'))}, {system}", () if here is None else (unseen,))
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    module = torch.get_device_module(kind)
    names = [str(module.get_device_name(number)) for number in range(torch.accelerator.device_count())]
    says = f"{len(names)} x {' and '.join(dict.fromkeys(names))}; {system}"
    if devices_here(1) is None:
        says += "; the planner does not know them (expertmesh plan --hardware)"
    faults = []
    if len(set(names)) > 1:
        faults.append("the devices are not equal, and the slowest sets the pace; choose with CUDA_VISIBLE_DEVICES")
    if kind.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        faults.append(f"{names[0]} has no bfloat16; set precision.compute to float32")
    return ReportLine("devices", says, tuple(faults))


def limits() -> ReportLine:
    """Open files and shared memory."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = files == resource.RLIM_INFINITY
    faults = []
    if not unlimited and files < OPEN_FILES:
        faults.append(
            f"a process may open {files} files, and a rank needs {OPEN_FILES} for sockets and shards; ulimit -n 65536"
        )
    says = f"{'any number of' if unlimited else f'{files:,}'} open files"
    memory = Path("/dev/shm")
    if memory.is_dir():
        free = shutil.disk_usage(memory).free
        says += f", {bytes_text(free)} of shared memory"
        several = torch.accelerator.is_available() and torch.accelerator.device_count() > 1
        if several and free < SHARED_MEMORY:
            faults.append(
                f"/dev/shm has {bytes_text(free)}, too little for NCCL between devices; start the container with "
                "--shm-size 16g or --ipc host"
            )
    return ReportLine("limits", says, tuple(faults))


def environment(variables: Mapping[str, str] = os.environ) -> ReportLine:
    """Return the variables that decide how a job runs."""
    names = sorted(name for name in variables if _TELLING.fullmatch(name))
    return ReportLine("variables", "\n".join(f"{name}={shown(name, variables[name])}" for name in names) or "none")


def shown(name: str, value: str) -> str:
    """Return `value` without secrets: hidden if the name says so, otherwise as `without_secrets` leaves it."""
    return HIDDEN if _SECRET_NAME.search(name) else without_secrets(value)


def without_secrets(text: str) -> str:
    """Return `text` without passwords in addresses and without tokens of the hub."""
    return _SECRET_VALUE.sub(HIDDEN, text)


def disk(directory: Path) -> ReportLine:
    """Try to publish a checkpoint and to lock a run in `directory`. Leaves nothing there."""
    while not directory.exists():
        directory = directory.parent
    free, faults, works = shutil.disk_usage(directory).free, [], []
    if free < FREE_BYTES:
        faults.append(f"{directory} has {bytes_text(free)} free, less than any checkpoint; free space")
    try:
        with tempfile.TemporaryDirectory(prefix=".expertmesh-doctor-", dir=directory) as scratch:
            for name, attempt in (("rename", _publish), ("locks", _lock)):
                if problem := attempt(Path(scratch)):
                    faults.append(f"{directory}: {problem}")
                else:
                    works.append(name)
    except OSError as error:
        faults.append(f"{directory}: cannot be written ({error.strerror}); choose another output_dir")
    says = f"{directory.resolve()} ({_file_system(directory)}): {bytes_text(free)} free"
    return ReportLine("disk", says + (f"; {', '.join(works)} right" if works else ""), tuple(faults))


def hub() -> ReportLine:
    """Ask the hub whether models can be downloaded. Offline work does not need it."""
    cache, token = Path(constants.HF_HUB_CACHE), "a token is set" if get_token() else "no token"
    faults: tuple[str, ...] = ()
    existing = next(parent for parent in (cache, *cache.parents) if parent.exists())
    if not os.access(existing, os.W_OK):
        faults = (f"the hub's cache {cache} cannot be written; set HF_HOME to a directory that can",)
    where = f"{token}; cache {cache}"
    endpoint = without_secrets(constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE:
        return ReportLine("hub", f"not asked, as HF_HUB_OFFLINE is set; {where}", faults)
    answers: list[float] = []
    # A thread, as no time limit of a request holds for the look-up of a name.
    asking = threading.Thread(target=_ask_hub, args=(answers,), name="doctor-hub", daemon=True)
    asking.start()
    asking.join(HUB_SECONDS)
    if not answers:
        return ReportLine("hub", f"{endpoint} not reached: local models and the cache alone work; {where}", faults)
    return ReportLine("hub", f"{endpoint} reached in {answers[0]:.1f} s; {where}", faults)


def _ask_hub(answers: list[float]) -> None:
    """Note the seconds until the hub answers, with whatever status; nothing if it does not."""
    started = time.monotonic()
    try:
        request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
        urllib.request.urlopen(request, timeout=HUB_SECONDS).close()
    except urllib.error.HTTPError:
        pass  # it has answered
    except (OSError, ValueError):
        return
    answers.append(time.monotonic() - started)


def _publish(scratch: Path) -> str | None:
    """Do what a checkpoint needs: sync files, rename a directory over an empty one."""
    try:
        (scratch / "new").mkdir()
        (scratch / "new" / "file").write_bytes(b"content")
        sync(scratch / "new" / "file")
        (scratch / "old").mkdir()
        os.rename(scratch / "new", scratch / "old")
        sync(scratch)
    except OSError as error:
        return f"a directory cannot be renamed or synced there ({error.strerror}); choose a POSIX file system"
    return None if (scratch / "old" / "file").exists() else "a renamed directory has lost its file"


def _lock(scratch: Path) -> str | None:
    """Try what keeps two runs out of one output_dir."""
    try:
        with RunLock(scratch):
            try:
                with RunLock(scratch):
                    return "two runs can hold one lock there; choose another file system"
            except InputError:
                return None
    except InputError as error:
        return str(error)


def _file_system(directory: Path) -> str:
    """Return the kind of a path's file system: that of the mount point that is its longest prefix."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return "unknown file system"
    path = directory.resolve()
    kinds = {Path(point): kind for _, point, kind, *_ in mounts if path.is_relative_to(point)}
    return kinds[max(kinds, key=lambda point: len(point.parts))] if kinds else "unknown file system"
