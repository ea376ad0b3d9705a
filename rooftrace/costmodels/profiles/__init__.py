"""Somebody else's measurements as plain records: Kineto traces, Nsight Compute, tables of steps.

`kineto.read_trace`, `ncu.read_counters` and `steps.read_steps` each read one kind of file;
`align.align` says which op of a graph a measured second belongs to.  Nothing here needs torch.
"""
