"""From the recorded torch.fx graph to plain records, and back."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
