"""Factors on bytes: what a measured run moved, for each byte that rules count."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
