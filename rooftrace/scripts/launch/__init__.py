"""A command line as a program in a separate process: launchers, ranks, a scratch folder."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
