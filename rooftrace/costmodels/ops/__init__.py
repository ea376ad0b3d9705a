"""The cost of an op by its rule: FLOPs by engine and precision, bytes by storage; families."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
