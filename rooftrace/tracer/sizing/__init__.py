"""One source at many sizes, each traced once and kept on disk."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
