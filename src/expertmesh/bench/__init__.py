"""Measurements of expertmesh beside its peers, on the user's own machine: what `expertmesh bench` runs.

step.py, layer.py, load.py and lora.py each measure one thing; `python -m benchmarks.step` and so on run them with
options of their own. parts.py chooses sizes and peers for the command line. Nothing here is needed to train.
"""
