"""`python -m expertmesh.demo [--output DIR]` does what `expertmesh demo` does."""

import argparse
import sys
from pathlib import Path

from expertmesh.config.errors import ExpertmeshError
from expertmesh.demo.run import run

parser = argparse.ArgumentParser(prog="python -m expertmesh.demo")
parser.add_argument("--output", type=Path, default=Path("demo"), help="directory of inputs and runs (default: demo)")
try:
    sys.exit(run(parser.parse_args().output))
except ExpertmeshError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
