"""Optimizers that know how parameters are sharded and stored; build.py chooses, and has the schedule."""
