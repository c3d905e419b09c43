"""The unsharded model: one block in memory at a time, run on the samples of every data rank."""
