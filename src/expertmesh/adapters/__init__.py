"""Put low-rank adapters (LoRA) on frozen models, start them, and read and write them as PEFT's files."""
