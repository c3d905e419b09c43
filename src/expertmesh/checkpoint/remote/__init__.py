"""Keep a run's checkpoints in object storage, beside those in its directory.

`store` defines which are complete; `upload`, `shares` and `download` transfer them; `local` copies what tools read.
"""
