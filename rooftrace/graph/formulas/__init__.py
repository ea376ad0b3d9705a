"""Whole numbers as exact formulas of sizes; graphs of formulas, proven for stated sizes."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
