"""What all outputs share: the records of a view, its renderers, units and wording."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
