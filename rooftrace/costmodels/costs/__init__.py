"""What one op costs on any chip: work, and bytes by the storage that they belong to."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
