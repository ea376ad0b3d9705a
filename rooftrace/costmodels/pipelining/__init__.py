"""Pipelines in seconds and bytes: the table of a schedule walked with the costs of its stages."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
