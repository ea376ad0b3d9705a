"""The gate of a repository: making and checking locks, reports of checks, and comments."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
