"""Save training state to disk in parts, one by each rank, publish it by one rename, and load it into any layout.

`manifest` is the format, `state` names the saved tensors, `write` and `read` save and load them, `directory` cleans up
the directory of a run's checkpoints, `remote` keeps them in object storage. docs/checkpoint-format.md describes the
files for other readers.
"""
