"""Reads measurements of any kind from a file; the contents tell the kind."""

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
    """Measurements do not fit the request; the message quotes them."""


def read_measured(source: str, use: str) -> Run | Trace | Sequence[StepTime]:
    """The measurements in a file.

    use: the purpose, in words, for the error.  Raises the errors of the file's reader, and
    MeasuredRequestError for counters, which are of use beside a trace only.
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
