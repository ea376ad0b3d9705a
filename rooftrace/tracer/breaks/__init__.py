"""torch.compile's front end run without a compiler: where graphs break, and why."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
