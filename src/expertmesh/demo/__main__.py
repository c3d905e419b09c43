"""`python -m expertmesh.demo [--output DIR]` does what `expertmesh demo` does."""

import argparse
import sys
from pathlib import Path

from expertmesh.config.errors import ExpertmeshError
from expertmesh.demo.run import run

parser = argparse.ArgumentParser(prog="python -m expertmesh.demo")
parser.add_argument("--output", type=Path, default=Path("demo"), help="directory of inputs and runs (default: demo)")
parser.add_argument("--long", action="store_true", help="train for three epochs: minutes instead of half a minute")
arguments = parser.parse_args()
try:
    sys.exit(run(arguments.output, arguments.long))
except ExpertmeshError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
