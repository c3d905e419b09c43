"""Training: loop.py reads top to bottom; exchange, optimizer and metrics are its parts."""
