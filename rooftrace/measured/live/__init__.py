"""Steps of the user's loop while it runs, and callbacks of trainers that watch it."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
