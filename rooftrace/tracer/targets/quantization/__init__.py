"""The formats in which a checkpoint stores weights, as the files beside a config declare them."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
