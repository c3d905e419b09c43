"""One MoE layer's experts, forward and backward, on one device: ours beside transformers' grouped_mm.

    python -m benchmarks.layer                          # Qwen3-30B-A3B's shape, bf16, on the accelerator
    OMP_NUM_THREADS=1 python -m benchmarks.layer --tiny # a shape for a laptop's CPU

What `expertmesh bench layer` measures, for the sizes that one asks for. Prints Markdown tables, writes JSON with
--json; fails where outputs or gradients differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from expertmesh.bench.case import TINY_LAYER, LayerCase, Shape
from expertmesh.bench.layer import SYSTEMS, measure, systems_on, table
from expertmesh.config.errors import ExpertmeshError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default=accelerator.type if accelerator else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--systems", help=f"some of {', '.join(SYSTEMS)}; default: those that run on the device")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    shape = TINY_LAYER if arguments.tiny else Shape()
    tokens = arguments.tokens or ([512, 2048] if arguments.tiny else [8192, 16384, 32768, 65536])
    device = torch.device(arguments.device)
    names = arguments.systems.split(",") if arguments.systems else systems_on(device)
    try:
        cases = (LayerCase(count, shape, arguments.dtype) for count in tokens)
        reports = [measure(case, names, device, arguments.repeats) for case in cases]
    except ExpertmeshError as error:
        sys.exit(str(error))
    print(*map(table, reports), sep="\n\n")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"reports": reports, "torch": torch.__version__}, indent=1) + "\n")


if __name__ == "__main__":
    main()
