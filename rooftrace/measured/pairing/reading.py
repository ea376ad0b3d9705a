"""Reads measurements of any kind from a file; the contents tell the kind."""

from __future__ import annotations

from collections.abc import Mapping

from rooftrace.measured.sources import Measured, records_of, source_of
from rooftrace.tracer.graph import OpGraph

Graphs = Mapping[str, OpGraph]
"""By phase."""


class MeasuredRequestError(ValueError):
    """Measurements do not fit the request; the message quotes them."""


def read_measured(path: str, use: str) -> Measured:
    """The measurements in a file.

    use: the purpose, in words, for the error.  Raises the errors of the file's reader, and
    MeasuredRequestError for counted bytes, which are of use beside measurements only.
    """
    kind = source_of(path)
    place = kind.place(path)
    if place:
        raise MeasuredRequestError(f"{path}: {kind.about}, which is not enough for {use}: {place}")
    return records_of(kind, path)
