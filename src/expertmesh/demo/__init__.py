"""The whole way in a few minutes on a laptop: `python -m expertmesh.demo`. It needs no downloads.

dataset.py, tokenizer.py and checkpoint.py build the inputs; `__main__.py` trains on them through the public
command line and shows what changed. Nothing of expertmesh imports this package.
"""
