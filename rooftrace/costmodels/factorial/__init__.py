"""Which factor of a grid moves a result most: main effects and interactions of pairs."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
