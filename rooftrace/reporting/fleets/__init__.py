"""Fleets: many units of work on many processes, their rows in one folder that can be resumed."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
