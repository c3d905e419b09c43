"""`expertmesh verify CHECKPOINT`: check that a training checkpoint still has the content that was written."""
