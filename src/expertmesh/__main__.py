"""`python -m expertmesh` is the command line."""

from expertmesh.cli.main import entry_point

entry_point()
