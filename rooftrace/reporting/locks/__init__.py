"""Locked costs: the costs of models in a file that a person reviews, and budgets for growth."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
