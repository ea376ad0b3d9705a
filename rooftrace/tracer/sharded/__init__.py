"""Modules that are spread over processes: what stands for the processes and their devices."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
