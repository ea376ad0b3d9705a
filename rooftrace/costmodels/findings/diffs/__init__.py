"""From two estimates to what changed between them, and why."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
