"""What changed in cost between two revisions of a model."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
