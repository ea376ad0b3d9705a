"""Tensors and values of a module or a checkpoint, two of them compared; limits of changes."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
