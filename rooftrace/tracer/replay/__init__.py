"""Code that would record the same again is not run: equal calls and equal turns of loops."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
