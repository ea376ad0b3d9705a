"""From the recorded torch.fx.Graph to plain records."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
