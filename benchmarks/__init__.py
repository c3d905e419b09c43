"""Measurements of expertmesh beside its peers; each script's docstring is the command that runs it."""
