"""Which size, chip fact or knob moves a cost most: elasticities, exact for FLOPs and bytes."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
