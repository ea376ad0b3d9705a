"""The measurements of one device as plain records, and their file; needs no torch."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
