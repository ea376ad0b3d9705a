"""Kinds of bytes, and how many of each a run moved for each byte that rules count."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
