"""A command line as a program, run in a process of its own, at one rank of many."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
