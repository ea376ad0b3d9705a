"""The measurement suite of one device: clock, peaks, operations alone, models step by step."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
