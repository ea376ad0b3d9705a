"""Runs code under a dispatch mode, which records every op on a tape."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
