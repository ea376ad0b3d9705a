"""Results other than a report in words, and the words that all outputs share."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
