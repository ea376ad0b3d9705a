"""Systems as data: how many chips are joined by what, and what collectives take there."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
