"""Amounts of kernels, fitted constants, and seconds on a chip by peaks or constants."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
