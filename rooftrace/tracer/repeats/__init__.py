"""Calls of modules that repeat and loops over time: a few are run for all."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
