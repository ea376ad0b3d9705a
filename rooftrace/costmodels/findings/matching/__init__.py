"""Which kernels of two graphs are the same work, wherever in the code they stand."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
