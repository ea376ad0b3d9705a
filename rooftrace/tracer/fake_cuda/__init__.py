"""A CUDA device that is not there: what torch.cuda says of a chip."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
