"""Kernels of a plan: ops grouped by the table of joins, their HBM bytes; execution models."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
