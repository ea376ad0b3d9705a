"""From any source to its graphs: a module, a step, a target here or in a process of its own."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
