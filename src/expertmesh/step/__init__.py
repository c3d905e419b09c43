"""One optimizer step: loss, router losses, forward and backward in every layout."""
