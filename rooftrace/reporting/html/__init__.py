"""Results as HTML: a cell of a notebook, a page to explore."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
