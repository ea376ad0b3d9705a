"""A plan on a chip, kernel by kernel and in total; its modules, nodes, products and queue."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
