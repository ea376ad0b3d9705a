"""Estimates: what a plan costs on a chip, kernel by kernel and in total."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
