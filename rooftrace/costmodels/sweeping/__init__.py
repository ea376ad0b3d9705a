"""A step at many sizes, on many chips: forms of a source evaluated, and what can be asked of them."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
