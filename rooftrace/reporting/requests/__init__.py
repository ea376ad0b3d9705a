"""What is asked of us: each argument once, with its option, its help and how its text is read."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
