"""Runs code under a dispatch mode and records every op; composite ops stay one op."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
