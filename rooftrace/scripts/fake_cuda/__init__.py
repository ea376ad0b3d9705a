"""A fake CUDA device: torch.cuda's answers for a chip."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
