"""Constants fitted to measured steps, and measured steps compared with predicted ones."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
