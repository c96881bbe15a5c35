"""What tensors take: bytes of all storages that are alive, their peak, and the largest tensor that was ever made."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts every tensor that an operation of this thread gives while the block runs; also of tensors without data.

        with TensorMemory() as memory:
            model(ids).logits.sum().backward()
        print(memory.peak)

    What a kernel takes for itself while it runs is not seen, nor what was there before (see `count`).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        """Bytes now."""
        self.peak = 0
        """Most bytes at once."""
        self.largest = 0
        """Elements of the largest tensor that was made."""
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def count(self, tensor: torch.Tensor) -> None:
        """Count a tensor that was there before, for as long as it lives; one that is known already counts once."""
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._known:
            return
        self._known[key] = weakref.ref(storage, functools.partial(self._freed, key, size))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _freed(self, key: int, size: int, _: object) -> None:
        self._known.pop(key, None)
        self.live -= size

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        """Run the operation, and count what it gives."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # its local tensors come here by themselves
        found = function(*arguments, **(options or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
                self.count(tensor)
        return found
