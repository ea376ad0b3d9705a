"""Bytes alive over a step, PyTorch's allocator run over it, the largest batch that fits."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
