"""Structure: modules become operator graphs.  The only package that imports torch, and lazily."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
