"""Formulas of kernels and steps, their limits, and experiments that would tell causes apart."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
