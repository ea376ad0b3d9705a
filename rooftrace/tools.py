"""Functions of special jobs: many targets, open sizes, meshes, other programs' files and habits."""

from rooftrace._face import public

__getattr__, __dir__, __all__ = public(__name__, __file__)
