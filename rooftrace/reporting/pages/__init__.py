"""A report on one screen, as a page, and as a folder of files."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
