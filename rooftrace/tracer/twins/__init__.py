"""Meta twins of modules, inputs and functions: of equal sizes, without data."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
