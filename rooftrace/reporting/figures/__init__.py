"""Figures of a report, and the timeline for Perfetto."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
