"""Placeholder of torchvision: its default wheels are built for CUDA and do not import with a CPU build of torch."""

from importlib import import_module

__version__ = "0.28.0"
__getattr__ = import_module("placeholders").attributes_of("torchvision")
