"""Collectives of processes on this machine, timed with torch.distributed on gloo."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
