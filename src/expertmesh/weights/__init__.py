"""Tensors <-> files: what is read from and written to Hugging Face model directories.

mapping.py plans with transformers' own conversion rules which file tensors make which model tensors; load.py and
save.py carry the plans out, each rank for its own bytes; audit.py compares; meta_model.py builds the empty model.
Nothing here knows about model families.
"""
