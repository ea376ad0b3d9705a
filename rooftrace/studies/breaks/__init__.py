"""Graph breaks: torch.compile's front end run without a compiler."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
