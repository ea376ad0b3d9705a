"""A command line as a program, run in this process, at one rank of many, ended cleanly."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
