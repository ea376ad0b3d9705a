"""A repository of git: two revisions, a checkout of each, the commit of a line."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
