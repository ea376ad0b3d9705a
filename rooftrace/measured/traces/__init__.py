"""A trace of torch.profiler as records: its ops, kernels and steps.  Nothing here needs torch."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
