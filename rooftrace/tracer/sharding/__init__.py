"""Modules over many processes on one: fake meshes, FSDP2, DDP, streams, pipelines."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
