"""The graph that is priced: other precisions, and attention as matrix products."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
