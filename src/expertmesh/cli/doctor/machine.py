"""Versions, devices, memory and limits of this machine."""

import resource
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from expertmesh.cli.doctor.finding import Finding
from expertmesh.cli.printing import bytes_text
from expertmesh.planning.forecast import devices_here, host_memory
from expertmesh.training.reporting.machine import device_name, versions

_FOR_DEVELOPERS = 'extra == "dev"'
OPEN_FILES = 1024
# What NCCL takes of /dev/shm grows with the devices; the 64 MiB of a container by default are too few for two.
SHARED_MEMORY = 2**30
_DEVICE_FILES = ("/dev/nvidia0", "/dev/kfd", "/dev/davinci0", "/dev/accel/accel0")
_DRIVER = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]


def packages() -> Finding:
    """What is installed of what expertmesh needs or can use, against the versions that it is tested with."""
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
    return Finding("packages", ", ".join(dict.fromkeys(lines)), tuple(faults))


def devices() -> Finding:
    """The accelerators that torch sees, with their driver, or the processor."""
    system = f"{sys.platform}, {bytes_text(int(host_memory()))} of memory"
    here = next((file for file in _DEVICE_FILES if Path(file).exists()), None)
    if not torch.accelerator.is_available():
        faults: tuple[str, ...] = ()
        if here is not None:
            built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no accelerator"
            faults = (
                f"{here} is there, but torch {torch.__version__} (built for {built}) sees no device; install a torch "
                f"that fits the driver{_driver()}, or check CUDA_VISIBLE_DEVICES",
            )
        return Finding("devices", f"{device_name(torch.device('cpu'))}, {system}", faults)
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    module = torch.get_device_module(kind)
    names = [str(module.get_device_name(number)) for number in range(torch.accelerator.device_count())]
    memory = bytes_text(module.get_device_properties(0).total_memory)
    says = f"{len(names)} x {' and '.join(dict.fromkeys(names))}, {memory} each{_driver()}; {system}"
    if devices_here(1) is None:
        says += "; the planner does not know them (expertmesh plan --hardware)"
    faults = ()
    if len(set(names)) > 1:
        faults = ("the devices are not alike, and the slowest sets the pace; choose with CUDA_VISIBLE_DEVICES",)
    if kind.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        faults = (*faults, f"{names[0]} has no bfloat16; set precision.compute to float32")
    return Finding("devices", says, faults)


def limits() -> Finding:
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
    return Finding("limits", says, tuple(faults))


def _driver() -> str:
    """NVIDIA's version of the driver, where its tool tells it."""
    if shutil.which(_DRIVER[0]) is None:
        return ""
    try:
        found = subprocess.run(_DRIVER, capture_output=True, text=True, timeout=10, check=True).stdout.split()
    except (subprocess.SubprocessError, OSError):
        return ", driver does not answer"
    return f", driver {' and '.join(dict.fromkeys(found))}"
