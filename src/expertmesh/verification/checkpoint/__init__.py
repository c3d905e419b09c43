"""`expertmesh verify CHECKPOINT`: whether a training checkpoint is what was written."""
