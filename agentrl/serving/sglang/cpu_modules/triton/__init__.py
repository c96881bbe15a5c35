"""Placeholder of triton, which SGLang imports everywhere; on the CPU none of its kernels is launched."""

from importlib import import_module

__version__ = "3.7.0"
__getattr__ = import_module("placeholders").attributes_of("triton")


class Config:
    """Settings of a kernel; SGLang builds lists of them at import."""

    def __init__(self, kwargs: dict[str, object] | None = None, **options: object) -> None:
        self.kwargs = kwargs or {}


def cdiv(dividend: int, divisor: int) -> int:
    """Return the quotient, rounded up."""
    return -(dividend // -divisor)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least the number."""
    return 1 << (number - 1).bit_length() if number > 0 else 1
