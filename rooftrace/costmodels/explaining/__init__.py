"""Where the numbers of a step come from: formulas, limits, and tests that would tell a limit."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
