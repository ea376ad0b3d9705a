"""Plans and estimates: a graph under an execution model, on a chip."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
