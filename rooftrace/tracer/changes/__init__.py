"""A quantity before and after, how much it may grow, and which things of two sides are the same."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
