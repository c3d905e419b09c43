"""Checkpoints in object storage, beside those of a run's directory: `store` holds the rules, `upload`, `shares` and
`download` move them.
"""
