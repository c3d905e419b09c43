"""Copy frozen experts that live in host memory (`parallel.offload: experts`) to the device, one layer ahead.

FSDP2 requests the tensors to gather from each packed parameter, before its layer runs in forward and in backward, and
frees the gathered ones after the layer (state/packed.py). With several ranks in a group it requests them one layer
ahead, on a stream of its own, and nothing is left to do here. With one rank it requests them when the layer runs. So
the copy for the next layer is started here, on a side stream: for the following layer in forward, for the preceding one
in backward. The first forward has no such copy. At most two layers' experts are on the device. On a CPU the same copies
are made, without streams.
"""

from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from expertmesh.compat import runs_in_backward


@dataclass(slots=True, eq=False)
class HostCopies:
    """The device copy of one parameter that is in progress, and its neighbours in the adjacent layers."""

    following: "HostCopies | None" = field(default=None, repr=False)
    """The copies of the same parameter in the next layer."""
    preceding: "HostCopies | None" = field(default=None, repr=False)
    """The copies of the same parameter in the layer before."""
    _source: Tensor | None = None
    _ahead: Tensor | None = None
    _done: torch.cuda.Event | None = None

    def take(self, source: Tensor, device: torch.device) -> Tensor:
        """Return `source` on `device`, for the current stream, and start the copy for the next layer.

        The next layer is the following one in forward, the preceding one in backward.
        """
        if self._ahead is None or self._source is not source:
            self._source = source
            self._start(device)
        found, done = self._ahead, self._done
        assert found is not None
        self._ahead = self._done = None
        if done is not None:
            stream = torch.cuda.current_stream(device)
            stream.wait_event(done)
            # Allocated on the side stream: its memory must not be reused before this stream has read it.
            found.record_stream(stream)
        # A task id means that backward runs. Recomputation in backward reuses gathered tensors and never calls this.
        backward = runs_in_backward()
        coming = self.preceding if backward else self.following
        if coming is not None and coming._source is not None and coming._ahead is None:
            coming._start(device)
        return found

    def _start(self, device: torch.device) -> None:
        assert self._source is not None
        if device.type != "cuda":
            self._ahead = self._source.to(device, copy=True)
            return
        with torch.cuda.stream(_side_stream(device)):
            self._ahead = self._source.to(device, non_blocking=True)
            self._done = torch.cuda.current_stream(device).record_event()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def in_host_memory(packed: Tensor, device: torch.device) -> Tensor:
    """Return a copy of `packed` in host memory, pinned for an accelerator so that copies to it run asynchronously."""
    own = packed.cpu()
    return own.pin_memory() if device.type == "cuda" else own
