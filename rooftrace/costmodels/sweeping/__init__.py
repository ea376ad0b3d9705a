"""A step at many sizes and on many chips: forms evaluated, and what can be asked of them."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
