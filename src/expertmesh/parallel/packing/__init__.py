"""Keep the samples of packed rows apart (by_samples.py) and attend to them without a dense mask (varlen.py)."""
