"""Triton kernels of the expert layer, chosen by `moe.kernels`: what is bound by memory, around the grouped products.

triton_kernels.py has the kernels, ops.py makes operators of them that torch.compile and fake tensors know, probe.py
decides whether this device runs them. What they compute is defined by the torch code beside their callers (pairs.py,
mlp_spec.py), which is used wherever they are not.
"""
