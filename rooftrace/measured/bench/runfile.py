"""Measurements as plain records, and their file; needs no torch.

A file is one `Run`: what one device did, case by case, with every repetition.  It is written to a
temporary file beside the target and then renamed, so that a reader sees the old or the new one.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import statistics
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from rooftrace.tracer.graph import write_bytes

SCHEMA = "rooftrace.run/1"
_GZIP = b"\x1f\x8b"
_ADVICE = "measure again with `rooftrace measure --out FILE`"


class RunFileError(ValueError):
    """A file that holds no measurements, or not those that were asked for: quotes it."""


@dataclass(frozen=True)
class OpTime:
    """What one op, or all alike ones, took in one step.

    target: the op's name, "aten.mm.default" in a graph, "aten::mm" from the profiler.  seconds: all
    calls together, without the ops inside of it; total: with them, None where that is the same.
    count: calls.  id, module: those of the op in its graph; None and "" where the
    profiler saw it.  shapes: of its inputs, as the profiler writes them.  kernels: what ran on the
    device.
    """

    target: str
    seconds: float
    count: int
    id: int | None = None
    module: str = ""
    shapes: tuple[Any, ...] = ()
    kernels: tuple[str, ...] = ()
    total: float | None = None

    @property
    def inclusive(self) -> float:
        """Seconds with the ops inside of it."""
        return self.seconds if self.total is None else self.total


@dataclass(frozen=True)
class MicroRow:
    """One operation alone, on cold caches unless `sizes` says otherwise.

    sizes: dtype, dimensions, layout.  flops, bytes: what one call computes and has to move (each
    input read once, each output written once); None where that is not what it is about.  seconds:
    of one call, every repetition.
    """

    key: str
    kind: str
    sizes: Mapping[str, Any]
    seconds: tuple[float, ...]
    flops: float | None = None
    bytes: float | None = None

    @property
    def median(self) -> float:
        """Seconds of one call."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class ModelRow:
    """One step of a model.

    phase: forward, training, prefill, decode, or "step" for a step of the user's own.  mode: eager
    or compiled.  scale: which sizes of a model of the suite.  sizes: batch, seq, kv.  seconds: of
    the wall, from an idle device to an idle device, every repetition.  device_seconds: the time of
    all kernels of one step (on a CPU: of all ops; of a replay: its wall), None where it was not
    profiled, or not all of it was seen.  unattributed: of these, what belongs to no op in `ops`.
    source: who measured `ops`: "profiler" in the step itself, "replay" op by op.  peak_bytes: most
    memory that tensors took; resident_bytes: between steps; None where the device does not tell.
    """

    key: str
    model: str
    phase: str
    mode: str
    sizes: Mapping[str, Any]
    seconds: tuple[float, ...]
    kind: str = ""
    scale: str = ""
    dtype: str = ""
    parameters: int | None = None
    device_seconds: float | None = None
    unattributed: float | None = None
    source: str = ""
    ops: tuple[OpTime, ...] = ()
    peak_bytes: int | None = None
    resident_bytes: int | None = None
    note: str = ""

    @property
    def median(self) -> float:
        """Seconds of one step."""
        return statistics.median(self.seconds)

    @property
    def attributed(self) -> float:
        """Seconds of all `ops` together."""
        return sum(op.seconds for op in self.ops)


@dataclass(frozen=True)
class Trouble:
    """A case that gave no row.  failed: it was tried (again only when asked); else left out."""

    key: str
    reason: str
    failed: bool = True


@dataclass(frozen=True)
class Run:
    """All that was measured on one device.

    device: its name, type, memory, clocks and driver as it tells them.  versions: of the libraries.
    dates: of each start, as YYYY-MM-DD.  settings: budget and choices.  notes: whatever a reader
    should know of the conditions.
    """

    device: Mapping[str, Any]
    versions: Mapping[str, str]
    dates: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    micro: tuple[MicroRow, ...] = ()
    models: tuple[ModelRow, ...] = ()
    troubles: tuple[Trouble, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def errors(self) -> tuple[Trouble, ...]:
        """The cases that were tried and failed."""
        return tuple(trouble for trouble in self.troubles if trouble.failed)

    @property
    def skipped(self) -> tuple[Trouble, ...]:
        """The cases that were left out."""
        return tuple(trouble for trouble in self.troubles if not trouble.failed)

    def done(self) -> set[str]:
        """Keys of the cases that need no other try: measured, or failed."""
        rows = {row.key for row in self.micro} | {row.key for row in self.models}
        return rows | {trouble.key for trouble in self.errors}

    def with_row(self, row: MicroRow | ModelRow | Trouble) -> Run:
        """The run with one more row, in place of what it had under the same key."""
        troubles = tuple(t for t in self.troubles if t.key != row.key)
        if isinstance(row, Trouble):
            return replace(self, troubles=(*troubles, row))
        if isinstance(row, MicroRow):
            kept = tuple(other for other in self.micro if other.key != row.key)
            return replace(self, micro=(*kept, row), troubles=troubles)
        others = tuple(other for other in self.models if other.key != row.key)
        return replace(self, models=(*others, row), troubles=troubles)

    def __enter__(self) -> Run:
        """`with rooftrace.measure(model, x) as run:` has the whole run in its block."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing is open."""

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the run to `path`; see `save_run`."""
        return save_run(self, path)


# -- files -----------------------------------------------------------------------------------------


def save_run(run: Run, path: str | os.PathLike[str]) -> Path:
    """Write `run` to `path`, compressed if it ends in .gz; nothing is left half-written."""
    path = Path(path)
    text = json.dumps(encoded(run), separators=(",", ":"), allow_nan=False).encode()
    content = gzip.compress(text, compresslevel=6, mtime=0) if path.suffix == ".gz" else text
    write_bytes(path, content)
    return path


def load_run(path: str | os.PathLike[str]) -> Run:
    """The run in a file.

    Raises FileNotFoundError, or RunFileError for a file that is cut off, damaged or of another
    kind or version.
    """
    path = Path(path)
    raw = path.read_bytes()
    try:
        data = json.loads(gzip.decompress(raw) if raw[:2] == _GZIP else raw)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise RunFileError(f"{path}: not a readable run ({reason}); {_ADVICE}") from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise RunFileError(f"{path}: schema is {schema!r}, expected {SCHEMA!r}; {_ADVICE}")
    try:
        return decoded(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise RunFileError(f"{path}: a damaged run ({reason}); {_ADVICE}") from None


def encoded(run: Run) -> dict[str, Any]:
    """The run as JSON has it."""
    data: dict[str, Any] = {"schema": SCHEMA, **_plain(run)}
    data["micro"] = [_plain(row) for row in run.micro]
    data["models"] = [{**_plain(row), "ops": [_plain(op) for op in row.ops]} for row in run.models]
    data["troubles"] = [_plain(row) for row in run.troubles]
    return data


def decoded(data: Mapping[str, Any]) -> Run:
    """The run that `encoded` wrote.  Raises KeyError, TypeError or ValueError for another thing."""
    models = (
        _record(ModelRow, {**row, "ops": tuple(_record(OpTime, op) for op in row.get("ops", ()))})
        for row in data["models"]
    )
    rest = {name: value for name, value in data.items() if name != "schema"}
    run = _record(
        Run,
        {
            **rest,
            "micro": tuple(_record(MicroRow, row) for row in data["micro"]),
            "models": tuple(models),
            "troubles": tuple(_record(Trouble, row) for row in data["troubles"]),
        },
    )
    for micro in run.micro:
        _check_times(micro)
    for model in run.models:
        _check_times(model)
    return run


def _plain(record: Any) -> dict[str, Any]:
    """The fields of a record that are not at their defaults."""
    return {
        item.name: value
        for item in fields(record)
        if (value := getattr(record, item.name)) != item.default or item.name == "failed"
    }


Record = TypeVar("Record", Run, MicroRow, ModelRow, OpTime, Trouble)


def _record(kind: type[Record], data: Mapping[str, Any]) -> Record:
    names = {item.name: str(item.type) for item in fields(kind)}
    unknown = sorted(set(data) - set(names))
    if unknown:
        raise ValueError(f"a {kind.__name__} has no {unknown[0]!r}")
    values = {name: _typed(kind, name, names[name], value) for name, value in data.items()}
    return kind(**values)


_TYPES: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "Mapping": (dict,),
    "tuple": (list, tuple),
}


def _typed(kind: type, name: str, annotation: str, value: Any) -> Any:
    if value is None and annotation.endswith("| None"):
        return None
    expected = _TYPES[annotation.partition("[")[0].partition(" |")[0]]
    if not isinstance(value, expected) or (isinstance(value, bool) and bool not in expected):
        raise TypeError(f"{kind.__name__}.{name} is {value!r:.60}, expected {annotation}")
    return _frozen(value) if tuple in expected else value


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, (list, tuple)) else value


def _check_times(row: MicroRow | ModelRow) -> None:
    times = row.seconds
    numbers = all(isinstance(t, (int, float)) and math.isfinite(t) and t >= 0 for t in times)
    if not times or not numbers:
        raise ValueError(f"{row.key!r} has times {times!r:.60}, expected seconds of at least 0")
