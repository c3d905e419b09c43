"""Other people's training code on sharded models, by the public Python interface alone."""
