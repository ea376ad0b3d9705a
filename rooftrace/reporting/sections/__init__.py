"""The results of a report, and the functions that make its sections and its JSON."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
