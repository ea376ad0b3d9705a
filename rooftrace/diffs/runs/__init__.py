"""Two measured steps compared, with the predicted difference."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
