"""Chips as data: units, number formats, and sourced facts. Needs the standard library only."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
