"""Steps per second and peak memory of every axis on 4 and 8 gloo ranks, in one run.

    python -m benchmarks.axes [--repeats 3] [--steps 12]

The small Qwen3-MoE and the rows of `benchmarks.layouts`, trained by `expertmesh train` in fp32; all layouts in turn,
then again in the other order. Medians of steps over the repetitions. Ranks share the cores of one machine, and a small
model is mostly messages: the figures compare layouts with each other, they do not say what an accelerator gains. Losses
of all runs have to agree with those of the first layout.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median

from .layouts import TOLERANCE, Curve, Layout, run, write_inputs


def _layout(name: str, ranks: int, **sizes: int) -> Layout:
    return Layout(name, ranks, tuple(f"parallel.{axis}={size}" for axis, size in sizes.items()))


LAYOUTS = (
    _layout("FSDP 4", 4, ep=1),
    _layout("FSDP 4, EP 4", 4, ep=4),
    _layout("replicate 2 × FSDP 2, EP 2", 4, replicate=2, ep=2),
    _layout("FSDP 2 × TP 2, EP 4", 4, tp=2, ep=4),
    _layout("FSDP 2 × CP 2, EP 4", 4, cp=2, ep=4),
    _layout("PP 2 × FSDP 2, EP 2", 4, pp=2, ep=2),
    _layout("FSDP 8, EP 8", 8, ep=8),
    _layout("FSDP 4 × TP 2, EP 8", 8, tp=2, ep=8),
    _layout("PP 2 × FSDP 2 × TP 2, EP 2", 8, pp=2, tp=2, ep=2),
    _layout("replicate 2 × CP 2 × TP 2, EP 4", 8, replicate=2, cp=2, tp=2, ep=4),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", help="where the temporary files go")
    arguments = parser.parse_args()
    found: dict[str, list[Curve]] = {}
    with tempfile.TemporaryDirectory(dir=arguments.directory) as scratch:
        root = Path(scratch)
        write_inputs(root)
        for repeat in range(arguments.repeats):
            for layout in LAYOUTS if repeat % 2 == 0 else LAYOUTS[::-1]:
                found.setdefault(layout.name, []).append(run(root, layout, arguments.steps, micro=1))
                shutil.rmtree(root / f"{layout.short}-float32")
    first = found[LAYOUTS[0].name][0]
    print("| layout | ranks | steps/s | peak memory of a rank | largest difference of a loss |\n|---|---|---|---|---|")
    worst = 0.0
    for layout in LAYOUTS:
        curves = found[layout.name]
        speed = median(curve.steps_per_second for curve in curves)
        peak = median(curve.peak_memory_bytes for curve in curves) / 2**20
        distance = max(curve.distance(first)[0] for curve in curves)
        worst = max(worst, distance)
        print(f"| {layout.name} | {layout.ranks} | {speed:.2f} | {peak:.0f} MiB | {distance:.1e} |")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
