"""Sections of tables and notes, their units, and the outputs that print them."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
