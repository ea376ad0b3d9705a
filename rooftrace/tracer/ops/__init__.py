"""What torch says of an op before it is run: schema, tags, process groups."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
