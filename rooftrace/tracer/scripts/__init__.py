"""Unmodified scripts as sources: their steps are found and recorded while they run."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
