"""Calibrated constants: what fractions of its peaks a chip reaches, and their files."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
