"""What every op of a graph costs, and which family it belongs to."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
