"""Prefill and decode on chips of their own, and the cache that goes from one to the other."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
