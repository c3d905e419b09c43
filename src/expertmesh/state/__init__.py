"""Sharded state: which box of which tensor a rank holds, and a pipeline stage seen as the full model."""
