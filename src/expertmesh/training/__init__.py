"""Training: loop.py reads top to bottom; exchange, optimizers and metrics are its parts."""
