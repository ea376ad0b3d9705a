"""Steps that really run: a module on real tensors, timed, profiled, and replayed op by op."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
