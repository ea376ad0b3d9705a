"""From a target's name to a module on meta: code, configs, programs, files of weights."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
