"""Steps over several meshes beside each other: which there are, the best of them, how it scales."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
