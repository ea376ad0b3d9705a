"""Files of measurements: traces of torch.profiler, tables, and counters of profilers."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
