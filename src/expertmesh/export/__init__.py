"""Plain Hugging Face directories from checkpoints and adapters: one process, no GPU, a block at a time."""
