"""What is known of the values of meta tensors, and what is assumed of the others."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
