"""Training state on disk: written in parts by every rank, published whole, loaded into any layout.

`schema` is the format, `state` names what is saved, `write` and `read` move it, `directory` keeps the
directory of a run's checkpoints tidy. docs/checkpoint-format.md describes the files for other readers.
"""
