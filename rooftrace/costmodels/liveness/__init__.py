"""When storages are made and when they go, over the ops of a step and its iterations."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
