"""What a script costs: its turns priced, and what they add up to."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
