"""Tensors of a module or a checkpoint: their inventory, and two of them compared."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
