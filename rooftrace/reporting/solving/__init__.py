"""Questions about a step, from what is asked to its answer."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
