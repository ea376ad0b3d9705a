"""Results as sections of tables and sentences, for a screen or a page."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
