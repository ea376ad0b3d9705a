"""Aligns a trace with a graph: the op of each measured second and of each counted byte."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
