"""The layers of a proof: bytes, forward, backward, update, metamorphic relations, artifacts."""
