"""Stands in for torchvision, whose usual wheels are built for CUDA and cannot be imported with a CPU build of torch."""

from placeholders import attributes_of

__version__ = "0.28.0"
__getattr__ = attributes_of("torchvision")
