"""The graph that is priced: precisions, attention as products, and the named rewrites."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
