"""Our counts of FLOPs beside those of other counters, and why they differ."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
