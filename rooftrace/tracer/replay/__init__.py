"""Calls and loop turns that repeat: a few are run, the rest are replayed."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
