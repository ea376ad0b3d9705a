"""Loops over time are cut short: a few turns run, and stand for all that would record the same."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
