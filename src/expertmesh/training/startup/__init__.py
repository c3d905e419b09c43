"""From a configuration to a sharded model without weights: what is refused, and what is prepared."""
