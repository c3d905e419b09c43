"""The verbs about data: `check` and `prepare`."""
