"""Locked costs and the gate of a repository: their file, budgets, comments, the pytest plugin."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
