"""Compiled steps: which ops of a graph really share a kernel, and how long each kernel takes."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
