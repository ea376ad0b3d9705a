"""Releases of PyTorch, and which kernels CUDA runs in each."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
