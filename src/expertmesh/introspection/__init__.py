"""What the model's own code does, found by running it on meta or on a small copy before weights are read."""
