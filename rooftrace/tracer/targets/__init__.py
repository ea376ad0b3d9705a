"""From the name of a target to a module on meta and its arguments."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
