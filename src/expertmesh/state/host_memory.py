"""Frozen experts that live in host memory (`parallel.offload: experts`) and are copied to the device one layer ahead.

FSDP2 asks each packed parameter for what it gathers, before its layer runs in forward and in backward, and frees it
behind the layer (state/packed.py). With several ranks in a group it asks one layer ahead, on a stream of its own, and
nothing is left to do here. With one rank it asks when the layer runs, so the copy of the next layer's is started here
(but in the very first forward), on a side stream: of the following layer in forward, of the one before in backward. At
most two layers' experts are on the device. On a CPU the same copies are made, without streams.
"""

from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor


@dataclass(slots=True, eq=False)
class HostCopies:
    """Of one parameter: the copy under way on the device, if there is one, and its neighbours in the layers around."""

    following: "HostCopies | None" = field(default=None, repr=False)
    preceding: "HostCopies | None" = field(default=None, repr=False)
    _source: Tensor | None = None
    _ahead: Tensor | None = None
    _done: torch.cuda.Event | None = None

    def take(self, source: Tensor, device: torch.device) -> Tensor:
        """`source` on `device`, for the current stream; starts the copy of what comes next in this direction."""
        if self._ahead is None or self._source is not source:
            self._source = source
            self._start(device)
        found, done = self._ahead, self._done
        assert found is not None
        self._ahead = self._done = None
        if done is not None:
            stream = torch.cuda.current_stream(device)
            stream.wait_event(done)
            found.record_stream(stream)
        # Recomputing in backward uses what backward has gathered, and asks for nothing.
        backward = torch._C._current_graph_task_id() != -1
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
    """For computing on `device`: from pinned memory, copies to an accelerator run beside it."""
    own = packed.cpu()
    return own.pin_memory() if device.type == "cuda" else own
