"""From a job to its graphs: sources, and forward, prefill, decode, training or a user's step."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
