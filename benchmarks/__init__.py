"""Measurements of expertmesh beside its peers; RESULTS.md has their commands. Some build on `expertmesh.bench`."""
