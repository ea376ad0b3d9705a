"""One step and variants of it, each with something changed, planned and timed in one place."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
