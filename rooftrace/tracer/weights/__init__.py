"""Files of weights, read a slice at a time."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
