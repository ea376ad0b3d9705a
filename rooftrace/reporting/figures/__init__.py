"""Figures, the timeline for Perfetto, and execution traces for simulators of networks."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
