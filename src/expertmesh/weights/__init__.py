"""Move tensors between Hugging Face model directories and the model.

`mapping.py` plans, with transformers' own conversion rules, which file tensors make which model tensors; these rules
run on the tensors without values of `lazy.py`. `load.py` and `save.py` execute the plans; each rank reads and writes
only its own bytes. `audit.py` compares the weights with their files. `meta_model.py` builds the empty model. The rules
for a model family come from transformers.
"""
