"""Steps of a script: found while it runs, recorded each, with the time that the script sees."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
