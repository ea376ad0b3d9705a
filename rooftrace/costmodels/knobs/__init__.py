"""Calibrated constants: fractions of its peaks that a chip reaches; intervals; their files."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
