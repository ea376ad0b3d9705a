"""Figures over many sizes: sweeps, rooflines that move with a size, tornados."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
