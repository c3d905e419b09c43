"""One file per way of spreading a model: fsdp.py (experts over ep, everything over FSDP2), checkpointing.py
(activations), grad_norm.py (norm and clipping over both views).
"""
