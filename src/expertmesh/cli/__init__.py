"""The command line: verbs, ranks and exit codes. Nothing here computes."""
