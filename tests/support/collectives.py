"""Count what ranks and devices wait for in a block of code."""

from collections import Counter
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Collectives(TorchDispatchMode):
    """Counts collectives by kind (FSDP2's are `_allgather` and `_reduce_scatter`), and as `waits` reads of a device's
    values on the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d."):
            self.counts[name.removeprefix("c10d.").partition("_.")[0].removesuffix("_base")] += 1
        elif "_local_scalar_dense" in name:
            self.counts["waits"] += 1
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Any:
        def waited(tensor: torch.Tensor) -> Any:
            self.counts["waits"] += 1
            with torch._C.DisableTorchFunction():  # a mode of checkpointing would call this again
                return tolist(tensor)

        tolist = torch.Tensor.tolist
        self._patch = mock.patch.object(torch.Tensor, "tolist", waited)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()
