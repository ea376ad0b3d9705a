"""A step as execution traces of MLCommons Chakra, for simulators of networks."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
