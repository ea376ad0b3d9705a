"""What a module or a file of weights consists of: parameters, bytes, statistics."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
