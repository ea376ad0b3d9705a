"""Which ops are one kernel, and the bytes that the kernel moves through HBM."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
