"""The whole way in a few minutes on a laptop: `expertmesh demo`. It needs no downloads.

dataset.py takes samples from the standard library; run.py builds the model, trains it through the public command line
and shows what changed.
"""
