"""Predict what a run will take before it is started: memory, bytes between ranks and time of every layout, from
config.json alone. `search.plan` is the way in; docs/formulas.md derives the formulas, benchmarks/planning.py measures
them.
"""
