"""What a traced model is made of: its modules, attention, kinds of kernels, and how it is wired."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
