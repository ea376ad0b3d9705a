"""Files of forms: the graph of each regime with the formulas of its numbers; read without torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rooftrace._reading import FileKind, beginning, json_of, record_of, text_of
from rooftrace.errors import RequestError
from rooftrace.graph import GraphError, GraphFileError, OpGraph, decoded_graph, graphs_bytes
from rooftrace.graph.formulas import Formula, FormulaError, GraphForm, Regime, leaves

SCHEMA = "rooftrace.form/1"
_KIND = FileKind("form", GraphFileError)
_DAMAGED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, GraphError)


@dataclass(frozen=True, slots=True)
class _RegimeRecord:
    """A regime in a file."""

    low: tuple[int, ...]
    high: tuple[int, ...]
    samples: list[tuple[int, ...]]
    proven: list[tuple[int, ...]]
    formulas: list[Any]
    draws: list[Any]
    slots: list[Any]
    template: dict[str, Any] = field(default_factory=dict)
    series: bool = False  # whether sequences of the graph grow with a size
    levels: list[list[int]] = field(default_factory=list)  # see `Regime`


@dataclass(frozen=True, slots=True)
class _FormRecord:
    """A form in a file."""

    schema: str
    title: str
    phase: str
    names: tuple[str, ...]
    regimes: list[dict[str, Any]]
    digest: str  # of the other fields


def form_bytes(title: str, phase: str, names: Sequence[str], regimes: Sequence[Regime]) -> bytes:
    """The bytes of the file of a form."""
    encoded = [_encoded(regime) for regime in regimes]
    data = {"schema": SCHEMA, "title": title, "phase": phase, "names": names, "regimes": encoded}
    return msgspec.json.encode({**data, "digest": _digest(title, phase, names, encoded)})


def _digest(title: str, phase: str, names: Sequence[str], regimes: Sequence[Any]) -> str:
    return hashlib.sha256(msgspec.json.encode([title, phase, names, regimes])).hexdigest()


def _encoded(regime: Regime) -> dict[str, Any]:
    form = regime.form
    return {
        "low": regime.low,
        "high": regime.high,
        "samples": form.samples,
        "proven": regime.proven,
        "levels": [list(values) for values in regime.levels],
        "formulas": form.formulas,
        "draws": form.draws,
        "slots": form.slots,
        "series": form.grows,
        "template": _plain(form.example),
    }


def _plain(graph: OpGraph) -> dict[str, Any]:
    """A graph as the plain data of a file of graphs."""
    data: dict[str, Any] = msgspec.json.decode(graphs_bytes({"form": graph}))["graphs"]["form"]
    return data


def read_form(path: str | os.PathLike[str]) -> tuple[str, str, tuple[str, ...], tuple[Regime, ...]]:
    """Title, phase, names and regimes of the form in a file.

    Raises FileNotFoundError, or GraphFileError for a file that is cut off, of another kind, or
    whose formulas do not give its graphs.
    """
    where = str(path)
    data = json_of(text_of(Path(path), _KIND), where, _KIND)
    file = record_of(_FormRecord, data if isinstance(data, dict) else {}, where, _KIND)
    if file.schema != SCHEMA:
        raise GraphFileError(f"{where}: schema is {file.schema!r:.60}, expected {SCHEMA!r}")
    try:
        digest = _digest(file.title, file.phase, file.names, file.regimes)
    except UnicodeEncodeError as problem:  # half of a surrogate pair
        raise _KIND.unreadable(where, problem) from None
    if file.digest != digest:
        raise GraphFileError(f"{where}: its digest is not that of its numbers; make the form again")
    regimes = tuple(
        _decoded(entry, file.names, f"regimes.{number}", where)
        for number, entry in enumerate(file.regimes)
    )
    return file.title, file.phase, file.names, regimes


def _decoded(entry: Mapping[str, Any], names: Sequence[str], place: str, where: str) -> Regime:
    record = record_of(_RegimeRecord, dict(entry), where, _KIND, place)
    template = decoded_graph(record.template, where, f"{place}.template")
    try:
        form = GraphForm(
            tuple(names),
            GraphForm.plain(template, record.series),
            tuple(msgspec.convert(record.formulas, list[Formula])),
            tuple(msgspec.convert(record.draws, list[leaves.Draw])),
            tuple(msgspec.convert(record.slots, list[leaves.Varying])),
            tuple(record.samples),
        )
        for numbers in (record.low, record.high, *record.samples, *record.proven):
            if len(numbers) != len(names) or min(numbers, default=1) < 1:
                raise FormulaError(f"{numbers}: expected a number for each of {', '.join(names)}")
        if not record.samples or form.at(record.samples[0]) != template:
            raise FormulaError("the formulas do not give the first graph")
        for numbers in (record.low, record.high):
            form.at(numbers).verify()
    except _DAMAGED as error:
        raise GraphFileError(f"{where}: {place}: a damaged form: {error}") from None
    levels = tuple(tuple(values) for values in record.levels)
    return Regime(form, record.low, record.high, tuple(record.proven), levels)


def looks_like_form(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is an existing file that claims to hold a form (by its first bytes)."""
    try:
        return Path(path).is_file() and SCHEMA.encode() in beginning(path, 200)
    except (OSError, ValueError, RequestError):
        return False
