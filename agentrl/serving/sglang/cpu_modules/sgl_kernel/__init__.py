"""Stands in for the CPU build of sgl_kernel, which no package index has.

SGLang imports its functions on every CPU, and calls them for speculative decoding and on Intel AMX only.
"""

from collections.abc import Callable
from typing import Any, NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*arguments: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} was called, and this is a stand-in: install the real sgl_kernel")

    return missing
