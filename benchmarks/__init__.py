"""Measurements of expertmesh beside its peers; RESULTS.md has their commands and what they gave."""
