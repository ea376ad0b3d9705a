"""Files of weights (safetensors, torch), read a slice at a time; nothing in them is run."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
