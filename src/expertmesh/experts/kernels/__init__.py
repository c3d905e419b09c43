"""Triton's kernels of `moe.kernels` for the memory-bound work around the experts' products.

triton_kernels.py has these kernels, ops.py makes operators of them that torch.compile and fake tensors know,
experts/install.py decides whether this device runs them. The torch code beside their callers (pairs.py, mlp_spec.py)
defines what they compute, and runs wherever they do not.
"""
