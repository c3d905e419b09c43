"""What runs where torch's grouped product does not: the loop over experts of `moe.compute: loop` (per_expert.py), and
Triton's kernels of `moe.kernels` around the products, for what is bound by memory.

triton_kernels.py has these kernels, ops.py makes operators of them that torch.compile and fake tensors know, probe.py
decides whether this device runs them. What they compute is defined by the torch code beside their callers (pairs.py,
mlp_spec.py), which is used wherever they are not.
"""
