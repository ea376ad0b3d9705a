"""Timing on one device: the clock, costs of launches, the device's own facts, and its peaks."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
