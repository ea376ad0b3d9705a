"""What is run: the phases of a step, a step of the user, the optimizer."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
