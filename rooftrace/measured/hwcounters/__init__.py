"""Files of hardware counters: rocprof's by kernel, and the totals of perf and LIKWID."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
