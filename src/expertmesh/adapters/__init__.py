"""Low-rank adapters (LoRA) on frozen models: which modules get them, how they start, and PEFT's files."""
