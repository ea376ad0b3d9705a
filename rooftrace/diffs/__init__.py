"""Two revisions, two steps or two runs beside each other: rows matched, causes, limits."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
