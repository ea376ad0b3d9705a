"""Systems as data: chips joined by levels of links, and constants of collectives on them."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
