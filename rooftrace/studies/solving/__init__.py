"""Sizes, chips, meshes or rates that hold a limit: every candidate is evaluated."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
