"""The tape: the recording of a run, as an fx graph with a record for each node."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
