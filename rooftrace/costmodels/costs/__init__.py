"""What one op costs on any chip: work, and bytes by whose bytes move."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
