"""Seconds of a plan on a chip: its kernels, the queue of host and device, the step."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
