"""Times one device with its own torch, and one step on real tensors."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
