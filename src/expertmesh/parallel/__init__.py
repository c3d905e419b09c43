"""The shard plan and what carries it out: shard_plan.py decides, apply.py does. One file per way of spreading a model:
fsdp.py (experts over ep, everything over FSDP2), tensor.py (tp), context.py (cp), pipeline.py (pp).
"""
