"""Classes of results, inputs and errors: for annotations and isinstance."""

from rooftrace._face import public

__getattr__, __dir__, __all__ = public(__name__, __file__)
