"""Seconds and host memory that loading a checkpoint takes, beside transformers' own `from_pretrained`.

    python -m benchmarks.load                                  # 2.2 GB in bfloat16, on 1 rank and on 4
    python -m benchmarks.load --layers 1 --repeats 1           # a quick look

What `expertmesh bench load` measures, for the sizes that one asks for: a random Qwen3-MoE checkpoint in the published
layout (one tensor per expert, several files) is loaded in fresh processes each time. Both systems store the parameters
in bfloat16 and shard them over all ranks; the sums of all squares must agree. Files are in the page cache, since they
have just been written: a cold disk adds the same to all. Needs as much free memory as three checkpoints. Prints a
Markdown table, writes JSON with --json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from expertmesh.bench.case import LOAD
from expertmesh.bench.model import check_loads, load_table, measure_load
from expertmesh.bench.result import machine
from expertmesh.config.errors import ExpertmeshError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=LOAD.layers, help="201 MB each, beside 134 MB")
    parser.add_argument("--ep", default="1,4", help="sizes; each is also the number of ranks")
    parser.add_argument("--directory", help="where the temporary checkpoint goes")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    case = dataclasses.replace(LOAD, layers=arguments.layers)
    sizes = [int(size) for size in arguments.ep.split(",")]
    try:
        systems = ("transformers_ep", "expertmesh_ep")
        report = measure_load(case, systems, sizes, arguments.repeats, arguments.directory)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(report | {"machine": machine()}, indent=1) + "\n")
        print(load_table(case, report))
        check_loads(report["runs"])
    except ExpertmeshError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
