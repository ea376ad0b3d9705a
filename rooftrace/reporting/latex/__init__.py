"""Results as LaTeX: tables that a paper takes in one by one, and a document with all of them."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
