"""Any result in words: on a screen, as text, as a page."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
