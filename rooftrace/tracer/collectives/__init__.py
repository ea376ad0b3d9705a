"""What ops exchange with other processes, and the marks of streams and storages; no torch."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
