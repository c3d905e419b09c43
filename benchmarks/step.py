"""Forward and backward of a Qwen3-MoE on local ranks, beside transformers' own EP x FSDP2 and others.

    python -m benchmarks.step --setting fp32-512 --systems transformers_ep4,expertmesh_ep4
    python -m benchmarks.step --profile expertmesh_ep4          # where the time goes

What `expertmesh bench step` measures, of the systems and sizes that one asks for: more systems stand in systems.py.
Prints a Markdown table, writes JSON with --json; fails if losses or gradient norms do not agree.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.systems import SETTINGS, TRAIN_LESS
from expertmesh.bench.case import write_checkpoint
from expertmesh.bench.model import check_steps, measure_step, step_table
from expertmesh.bench.result import machine
from expertmesh.bench.worker import launch
from expertmesh.config.errors import ExpertmeshError

WORKER = "benchmarks.systems"


def main() -> None:
    arguments = parse_arguments()
    case = dataclasses.replace(
        SETTINGS[arguments.setting],
        **{k: v for k in ("ranks", "tokens", "experts", "layers") if (v := getattr(arguments, k)) is not None},
    )
    try:
        if arguments.profile:
            with tempfile.TemporaryDirectory() as scratch:
                case = write_checkpoint(case, Path(scratch))
                print(launch("profile", case, [arguments.profile], arguments.repeats, WORKER)["profile"])
            return
        names = arguments.systems.split(",")
        report = measure_step(case, names, arguments.repeats, with_memory=not arguments.no_memory, worker=WORKER)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(report | {"machine": machine()}, indent=1) + "\n")
        print(step_table(case, report))
        check_steps(case, report["time"], keys=["loss"])
        whole = {name: row for name, row in report["time"].items() if not name.startswith(TRAIN_LESS)}
        if whole:
            check_steps(case, whole)
    except ExpertmeshError as error:
        sys.exit(str(error))


def parse_arguments() -> argparse.Namespace:
    """The command line; shapes that are not given come from the named setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=sorted(SETTINGS), default="fp32-512")
    parser.add_argument("--systems", default="transformers_ep4,transformers_fsdp4,unsharded")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--tokens", type=int, help="tokens per rank and step")
    parser.add_argument("--experts", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--no-memory", action="store_true", help="skip the launches that measure memory")
    parser.add_argument("--profile", metavar="SYSTEM", help="print one system's CPU profile and nothing else")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
