"""Packed rows: by_samples.py keeps their samples apart; varlen.py attends them without a dense mask."""
