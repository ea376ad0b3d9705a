"""Any code on meta tensors becomes an operator graph.  Imports torch."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
