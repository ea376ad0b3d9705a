"""Phases of a step, steps of the user, optimizers, and what other counters say of a call."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
