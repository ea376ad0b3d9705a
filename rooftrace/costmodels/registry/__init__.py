"""Which function prices which op, and what its rule says the op is."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
