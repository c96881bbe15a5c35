"""Placeholder of the CPU build of sgl_kernel, which no package index provides.

SGLang imports its functions on every CPU, but calls them only for speculative decoding and on Intel AMX.
"""

from collections.abc import Callable
from typing import Any, NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*arguments: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} was called on a placeholder: install the real sgl_kernel")

    return missing
