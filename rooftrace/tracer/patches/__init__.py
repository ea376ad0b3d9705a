"""What a recording changes in the process, so that only the threads that it records notice."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
