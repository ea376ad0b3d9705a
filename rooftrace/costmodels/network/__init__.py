"""Seconds of collectives and of sending tokens to experts, on the levels of a system."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
