"""Describe sharded state: which box of which tensor a rank holds, and a pipeline stage presented as the full model.

It also holds the formats of packed frozen weights, and the checks of what other libraries do with a sharded model.
"""
