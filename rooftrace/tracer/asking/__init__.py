"""What a call or a command asks for, checked before anything is traced; no torch."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
