"""Training: loop.py reads top to bottom; loss, optimizer, metrics and faults are its parts."""
