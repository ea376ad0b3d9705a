"""What a call or a command asks for: one Job, checked before anything runs; source lines."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
