"""Seconds of plans at many sizes at once, from amounts that are columns over sizes."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
