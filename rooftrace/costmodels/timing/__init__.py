"""Seconds of a plan on a chip: kernels, collectives, queue, streams, pipelines, the step."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
