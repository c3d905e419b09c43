"""The whole way in a few minutes on a laptop: `expertmesh demo`. It needs no downloads.

dataset.py, tokenizer.py and checkpoint.py build the inputs; run.py trains on them through the public command line and
shows what changed.
"""
