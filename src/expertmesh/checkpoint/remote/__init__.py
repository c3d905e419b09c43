"""Checkpoints in object storage, beside those of a run's directory: `store` holds the rules, `upload` and `download`
move them.
"""
