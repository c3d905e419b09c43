"""Tensors <-> files: what is read from and written to Hugging Face model directories.

files.py knows bytes (safetensors headers, byte ranges); pieces.py knows which part of a tensor comes from
which part of which other tensor; mapping.py asks transformers' own conversion rules what a family's files
hold; load.py and save.py stream, each rank its own bytes; meta_model.py builds the empty model. Nothing here
knows about model families.
"""
