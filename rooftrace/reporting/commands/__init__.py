"""One file a command: its function, its arguments, its sides and sources."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
