"""Revisions of a git repository: which two are meant, a checkout of each, who wrote a line."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
