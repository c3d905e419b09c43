"""Report on a run: lines for the terminal, metrics.jsonl, run.json, audit.json."""
