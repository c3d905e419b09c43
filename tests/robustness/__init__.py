"""Hostile input and faults of the machine, over all that is read and written."""
