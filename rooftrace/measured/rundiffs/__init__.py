"""Two measured steps beside each other: what became slower, what is new, what is gone."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
