"""Plans for any sizes: kernels as formulas, found by their comparisons."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
