"""The gate of a repository: locks made and checked, what a check says, comments that carry it."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
