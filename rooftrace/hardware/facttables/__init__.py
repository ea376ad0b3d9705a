"""Facts in TOML tables: read with their sources, written, and what is remarked on them."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
