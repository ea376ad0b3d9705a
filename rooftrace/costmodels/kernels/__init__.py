"""Amounts of kernels, and their seconds on a chip by its peaks or by calibrated constants."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
