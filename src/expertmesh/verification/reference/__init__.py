"""The unsharded model with which the job is compared: one block in memory at a time, on the samples of each data rank.

It uses the family's code from transformers and plain torch, never expertmesh's layers, dispatch, loss or packing.
"""
