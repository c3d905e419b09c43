"""Adapters on one MoE layer's experts, forward and backward, on one device: ours beside stock PEFT.

    OMP_NUM_THREADS=1 python -m benchmarks.lora            # the shapes of RESULTS.md, on a CPU
    python -m benchmarks.lora --device cuda --dtype bfloat16

What `expertmesh bench lora` measures, on the device and in the dtype that one asks for.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys

import torch

from expertmesh.bench.case import LORA
from expertmesh.bench.lora import SYSTEMS, R, measure, table
from expertmesh.config.errors import ExpertmeshError
from expertmesh.training.reporting.machine import device_name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    parser.add_argument("--device", default=accelerator.type if accelerator else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="instead of that of each case")
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    cases = dict.fromkeys(dataclasses.replace(case, dtype=arguments.dtype or case.dtype) for case in LORA)
    print(f"rank {R}, {device_name(device)}, torch {torch.__version__}\n")
    try:
        print(table([measure(case, tuple(SYSTEMS), device, arguments.repeats) for case in cases]))
    except ExpertmeshError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
