"""Copies of modules on meta, tensors in nested objects, and overrides for one thread."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
