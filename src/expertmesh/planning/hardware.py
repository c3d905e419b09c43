"""The devices a plan is made for: a table with sources (hardware.yaml), extended or overridden by a file of the user's.

Numbers are peaks as vendors state them; `Efficiency` says how much of a peak training reaches, with one set of defaults
that benchmarks calibrate. A plan is only as good as these few numbers, so they are printed with it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from expertmesh.config.base import Section, refuse
from expertmesh.config.errors import InputError
from expertmesh.config.explain import explain
from expertmesh.config.yaml_text import parse_yaml


class Efficiency(Section):
    """The share of each peak that is reached."""

    products: float = Field(default=0.65, gt=0, le=1)
    """Dense matrix products in bf16: large ones of the published H100 runs reach 0.6 to 0.75."""
    experts: float = Field(default=0.45, gt=0, le=1)
    """Grouped products alone: in a layer of Qwen3-30B's shape 544 of 989 TFLOP/s on an H100 (`make gpu`), and less
    with fewer rows for each expert. What is moved around them counts as memory."""
    attention: float = Field(default=0.35, gt=0, le=1)
    """Fused attention, forward and backward: FlashAttention-2 on an H100, about 350 TFLOP/s (arXiv 2407.08608)."""
    memory: float = Field(default=0.7, gt=0, le=1)
    """Element-wise operations, of the memory bandwidth."""
    links: float = Field(default=0.75, gt=0, le=1)
    """All-gather and reduce-scatter of large buffers, of the link."""
    all_to_all: float = Field(default=0.4, gt=0, le=1)
    """All-to-all with uneven splits: 41 to 203 of 450 GB/s over NVLink by the eager path (kraken pull request 32)."""
    overlap: float = Field(default=0.7, gt=0, le=1)
    """Share of compute behind which prefetched collectives can hide: the first and last blocks of each pass cannot."""
    interference: float = Field(default=0.2, ge=0, le=1)
    """Share of its time that a hidden collective still costs: its kernels take 16 to 24 of an H100's 132
    multiprocessors."""


class Hardware(Section):
    """One kind of device, in nodes of `devices_per_node`. FLOP/s, bytes, bytes per second and direction, seconds."""

    section: ClassVar[str] = ""

    torch_device: str = "cuda"
    """Its type in torch, by which packed rows are attended (ROCm's is cuda)."""
    matches: Sequence[str] = ()
    """Parts of the name that the driver gives the device."""
    flops: Mapping[str, PositiveFloat]
    """Dense peak by compute dtype."""
    memory: PositiveFloat
    """Bytes of memory of one device."""
    memory_bandwidth: PositiveFloat
    within_node: PositiveFloat
    """Bandwidth of one device to the others of its node."""
    between_nodes: PositiveFloat
    """Bandwidth of one device to other nodes."""
    host_link: PositiveFloat = 25.0e9
    """Bytes per second that one device copies from its node's memory: PCIe 4.0 x16, less its protocol."""
    host_memory: PositiveFloat = 64.0e9
    """Bytes of its node's memory for each device. `train` takes those of its machine."""
    devices_per_node: PositiveInt = 8
    overhead: float = Field(default=3.5e9, ge=0)
    """Bytes that the driver's context and communication buffers take of each device."""
    headroom: float = Field(default=0.05, ge=0, lt=1)
    """Share of memory left free, for the allocator's gaps and a prediction that is a little low."""
    launch_seconds: PositiveFloat = 6.0e-6
    """Time of the host for one eager operation; a device that computes faster waits for it."""
    collective_seconds: PositiveFloat = 2.5e-5
    """Latency of one collective."""
    efficiency: Efficiency = Efficiency()
    sources: Mapping[str, str]
    """Sources of the numbers."""

    @model_validator(mode="after")
    def _combine(self) -> Self:
        required = ("flops", "memory", "memory_bandwidth", "within_node", "between_nodes")
        missing = [name for name in required if name not in self.sources]
        if missing:
            refuse(f"sources has nothing for {missing[0]}; say where the number is from")
        if "bfloat16" not in self.flops:
            refuse("flops has no bfloat16; give the dense peak in bf16")
        return self

    def peak(self, dtype: str) -> float:
        """Return the FLOP/s of products in `dtype`; float32 defaults to 1/16 of bfloat16's, others to half of that."""
        float32 = self.flops.get("float32", self.flops["bfloat16"] / 16)
        return float(self.flops.get(dtype, float32 if dtype == "float32" else float32 / 2))


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of a job."""

    name: str
    """Kind of device, a name of the hardware table."""
    nodes: int
    per_node: int
    """Devices of each node."""
    hardware: Hardware

    @property
    def count(self) -> int:
        return self.nodes * self.per_node

    def __str__(self) -> str:
        return f"{self.nodes}x{self.per_node} {self.name}"


def hardware_table(extra: str | Path | None = None) -> dict[str, Hardware]:
    """Return every known device by name; those of the file `extra` replace or join ours.

    Raises:
        InputError: The file cannot be read, or is no table of devices.
    """
    table = dict(_built_in())
    if extra is not None:
        try:
            table |= _read(Path(extra).read_text(encoding="utf-8"), str(extra))
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--hardware {extra}: cannot be read: {error}", key="plan.unreadable-hardware") from error
    return table


@cache
def _built_in() -> Mapping[str, Hardware]:
    text = files("expertmesh.planning").joinpath("hardware.yaml").read_text(encoding="utf-8")
    return _read(text, "hardware.yaml")


def name_of(called: str, table: Mapping[str, Hardware]) -> str | None:
    """Return the table's name of a device that the driver names `called`, or None; the first that matches counts."""
    return next((name for name, each in table.items() if any(p.lower() in called.lower() for p in each.matches)), None)


def unknown_device(which: str, mend: str) -> InputError:
    return InputError(f"the planner does not know {which}; {mend}", key="plan.unknown-device")


def parse_devices(text: str, table: Mapping[str, Hardware]) -> Devices:
    """Read `2x8 h200` or `2x8xh200` (nodes x devices), `16 h200` or `16xh200` (full nodes, or a part of one).

    Raises `InputError` for other text, a device that is not in `table`, or more than 65,536 devices.
    """
    matched = re.fullmatch(r"\s*(?:(\d+)\s*x\s*)?(\d+)\s*[x\s]\s*([\w.-]*[a-z][\w.-]*)\s*", text.lower())
    if matched is None:
        raise InputError(
            f"--devices {text!r}: write nodes x devices and their kind, as in '2x8 h200'", key="plan.invalid-devices"
        )
    nodes, count, name = int(matched[1] or 1), int(matched[2]), matched[3]
    if name not in table:
        raise unknown_device(f"{name} (--devices {text!r})", f"use one of {', '.join(table)}, or --hardware FILE")
    per_node = table[name].devices_per_node
    if matched[1] is None and count > per_node:
        if count % per_node:
            raise InputError(
                f"--devices {text!r}: {count} is not a multiple of the {per_node} devices of a node; "
                "write nodes x devices",
                key="plan.invalid-devices",
            )
        nodes, count = count // per_node, per_node
    if not 1 <= nodes * count <= 65536:
        raise InputError(
            f"--devices {text!r}: {nodes * count} devices; a plan is for 1 to 65,536", key="plan.invalid-devices"
        )
    return Devices(name, nodes, count, table[name])


def _read(text: str, where: str) -> dict[str, Hardware]:
    content = parse_yaml(text, where).value
    if not isinstance(content, dict):
        raise InputError(f"{where}: is not a table of devices by name", key="plan.invalid-hardware")
    table = {}
    for name, values in content.items():
        try:
            table[str(name).lower()] = Hardware.model_validate(values)
        except ValidationError as error:
            raise InputError(
                f"{where}: {explain(error, Hardware, prefix=(str(name),))}", key="plan.invalid-hardware"
            ) from None
    return table
