"""Values of tensors on meta, and assumptions about them; copies on meta; nested tensors."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
