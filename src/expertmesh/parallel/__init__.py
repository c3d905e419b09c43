"""Plan how a model is sharded and carry the plan out: shard_plan.py decides, apply.py executes.

There is one file per way to spread a model: apply.py (experts over ep, everything over FSDP2), tensor.py (tp),
context.py (cp), pipeline.py (pp). packing.py keeps the samples of packed rows apart.
"""
