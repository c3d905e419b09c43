"""Explain errors of the hub's clients: whether the hub was reached at all, and what its answer means.

transformers, datasets and huggingface_hub each wrap the reason in errors of their own, so the chain of causes is
searched for it.
"""

from collections.abc import Iterator

from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError

_BUSY = 429


def hub_mend(error: BaseException, local: str, otherwise: str) -> str:
    """Return how to fix `error`: `otherwise` if the hub has answered, else fix the network, or use `local` instead."""
    behind = list(_behind(error))
    if any(isinstance(each, GatedRepoError) for each in behind):
        return "accept the conditions on its page on the hub, and set HF_TOKEN"
    responses = [each.response for each in behind if isinstance(each, HfHubHTTPError) and each.response is not None]
    unreached = any(isinstance(each, ConnectionError | TimeoutError | LocalEntryNotFoundError) for each in behind)
    if not unreached and all(response.status_code < _BUSY for response in responses):
        return otherwise
    if constants.HF_HUB_OFFLINE:
        return f"HF_HUB_OFFLINE is set, so nobody has asked the hub, and the cache has none; unset it, or {local}"
    return f"the hub was not reached, so the network is the cause and not the name; connect, or {local}"


def _behind(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the chain of its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
