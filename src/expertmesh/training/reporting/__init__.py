"""What a run says: lines for the terminal, metrics.jsonl, run.json, audit.json."""
