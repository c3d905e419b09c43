"""Find out what the code of a model does, by running it on meta or on a small copy before weights are read."""
