"""Arguments of calls and commands, each declared once with its option, help and reader."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
