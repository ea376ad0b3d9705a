"""An op as a rule sees it: sizes, precisions and arguments."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
