"""Measurements of any kind from a file, told by its contents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rooftrace.measured.runs import Run, load_run
from rooftrace.measured.sources import KINDS, kind_of
from rooftrace.measured.tables import StepTime, read_steps
from rooftrace.measured.traces import Trace, read_trace
from rooftrace.tracer.graph import OpGraph

Graphs = Mapping[str, OpGraph]
"""By phase."""


class MeasuredRequestError(ValueError):
    """Measurements that do not go with what was asked; the message quotes them."""


def read_measured(source: str, use: str) -> Run | Trace | Sequence[StepTime]:
    """The measurements in a file.

    use: what they are wanted for, in an error.  Raises what the reader of the file raises, and
    MeasuredRequestError for counters, which stand beside a trace only.
    """
    kind = kind_of(source)
    if kind == "run":
        return load_run(source)
    if kind == "trace":
        return read_trace(source)
    if kind == "steps":
        return read_steps(source)
    raise MeasuredRequestError(
        f"{source}: {KINDS[kind]}, which is not enough for {use}: it stands beside a trace, as in "
        f"`rooftrace validate TRACE --counters {source}`"
    )
