"""Pipelines: the order of work of each process, and a model cut into stages."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
