"""What to make of an estimate: savings, changes, other counters, the queue of kernels."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
