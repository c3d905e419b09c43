"""Records to token ids and targets: chat templates in their sandbox, spans that are targets, pairs of responses."""
