"""Savings and what-ifs: one thing changed, planned and timed again."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
