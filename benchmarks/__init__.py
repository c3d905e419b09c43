"""Measurements of expertmesh beside its peers; RESULTS.md has their commands. Most live in `expertmesh.bench`."""
