"""Run the training code of transformers and TRL on sharded models, through the public Python interface alone."""
