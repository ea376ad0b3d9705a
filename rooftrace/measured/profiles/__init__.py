"""Somebody else's measurements as plain records: Kineto traces, Nsight Compute, tables of steps.

`kineto.read_trace`, `ncu.read_counters` and `steps.read_steps` each read one kind of file;
`align.align` says which op of a graph a measured second belongs to.  Nothing here needs torch.
"""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
