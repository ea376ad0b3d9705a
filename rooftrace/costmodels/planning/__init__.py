"""Plans: a graph priced, grouped into kernels and launched under an execution model."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
