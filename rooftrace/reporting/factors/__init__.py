"""Measured factors on bytes, in words and in tables."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
