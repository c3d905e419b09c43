"""One rank of a large job run without the job: our own code on fake tensors and a fake process group, no weights."""
