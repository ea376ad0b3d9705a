"""Changes that would make a step faster, each planned and timed again; graph breaks priced."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
