"""Chips as TOML files: read, written, and looked over for mistakes."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
