"""What an allocator makes of a step's tensors: rounding, workspaces, cached segments."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
