"""Graphs whose numbers are formulas of sizes: fitted to traces, proven on others; no torch."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
