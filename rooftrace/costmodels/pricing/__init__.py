"""What an op is and what it costs on any chip: costs, kinds, families, and the rules' registry."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
