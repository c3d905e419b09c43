"""`python -m expertmesh.config FILE` writes the JSON schema of the configuration to FILE."""

import sys
from pathlib import Path

from expertmesh.config.schema import schema_text

if len(sys.argv) != 2:
    sys.exit("usage: python -m expertmesh.config FILE")
Path(sys.argv[1]).write_text(schema_text(), encoding="utf-8")
