"""A trace beside a graph: which op each measured second, and each counted byte, belongs to."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
