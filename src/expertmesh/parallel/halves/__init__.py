"""`moe.interleave`: the rows of a micro-batch run through each Mixture-of-Experts block as two halves, of which one
computes while the other's tokens travel. plan.py decides, blocks.py runs a block, travel.py is the expert layer's part.
"""
