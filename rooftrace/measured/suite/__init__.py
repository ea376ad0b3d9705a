"""The measurement suite: its cases, their order and budget, their graphs."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
