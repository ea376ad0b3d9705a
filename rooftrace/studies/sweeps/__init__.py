"""A step at many sizes on many chips: tables, cliffs, factorial grids."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
