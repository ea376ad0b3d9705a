"""Two measured steps beside each other, and the predicted difference."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
