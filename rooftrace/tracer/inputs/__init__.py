"""Arguments of one call of a module: on meta, at other sizes, guessed; restored after a call."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
