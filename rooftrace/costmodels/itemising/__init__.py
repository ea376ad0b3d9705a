"""Tables of single things that add up to a step: its matrix products, its nodes."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
