"""What graph breaks of torch.compile cost: a step priced with them, and without each of them."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
