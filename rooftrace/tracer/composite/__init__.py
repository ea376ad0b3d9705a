"""Attention, recurrent networks, norms and dropout as one op each."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
