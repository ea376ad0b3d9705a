"""The records of a traced graph, their file, and what is computed from them alone; no torch."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
