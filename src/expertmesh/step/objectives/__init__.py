"""Hold a file for each objective of preference pairs, on the mechanism that they share (pairs.py); choose.py names
them.
"""
