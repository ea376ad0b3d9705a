"""Measurements as plain records, and their file; needs no torch.

A file is one `Run`: the measurements of one device, case by case, with every repetition.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rooftrace._reading import FileKind, json_of, record_of, text_of
from rooftrace._shown import short, some
from rooftrace._writing import write_packed
from rooftrace.errors import ProfileError
from rooftrace.graph import OpGraph
from rooftrace.hardware.units import format_time
from rooftrace.measured.alignment import KernelTime

SCHEMA = "rooftrace.run/1"


_KIND = FileKind("run", ProfileError, "measure again with `rooftrace measure --out FILE`")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTime:
    """The time of one op in one step; of a profiler, of all calls with equal shapes together."""

    target: str  # "aten.mm.default" in a graph, "aten::mm" from the profiler
    seconds: float  # s, all calls together, without the ops inside of them
    count: int  # calls in the step
    id: int | None = None  # of the op in its graph; None from the profiler
    module: str = ""  # path of the op's module; "" from the profiler
    shapes: tuple[Any, ...] = ()  # of the inputs, as the profiler writes them
    kernels: tuple[str, ...] = ()  # names of kernels on the device
    total: float | None = None  # s, with the ops inside; None where that is `seconds`

    @property
    def inclusive(self) -> float:
        """Seconds of all calls, with the ops inside of them."""
        return self.seconds if self.total is None else self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroRow:
    """The times of one operation alone, on caches that hold none of its data."""

    key: str  # the name of the case, unique in a run
    kind: str  # "matmul", "copy" ...
    sizes: Mapping[str, int | str | bool]  # dtype, dimensions, layout
    seconds: tuple[float, ...]  # s, of one call, every repetition
    flops: float | None = None  # FLOP of one call; None for a launch
    bytes: float | None = None  # byte: each input read once, each output written once; or None

    @property
    def median(self) -> float:
        """Median seconds of one call."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """The times of one step of a model, and of its ops where they were measured."""

    key: str  # the name of the case, unique in a run; see `key_of`
    model: str  # a model of the suite, or a target
    phase: str  # forward, training, prefill, decode; "step" for a step that the user wrote
    mode: str  # eager or compiled
    sizes: Mapping[str, int]  # batch, seq, kv
    seconds: tuple[float, ...]  # s, on the wall from idle device to idle device, every repetition
    kind: str = ""  # the sort of model, of the suite
    scale: str = ""  # of a model of the suite: full, small, tiny
    dtype: str = ""  # of the weights
    parameters: int | None = None  # numbers in the weights
    # s, all kernels of a step (on a CPU: all ops; of a replay: its wall); None: not all was seen
    device_seconds: float | None = None
    unattributed: float | None = None  # s of `device_seconds` that belong to no op in `ops`
    source: str = ""  # who measured `ops`: "profiler" in the step itself, "replay" op by op
    ops: tuple[OpTime, ...] = ()  # empty where they were not measured
    kernels: tuple[KernelTime, ...] = ()  # of a compiled step, in launch order
    peak_bytes: int | None = None  # byte, the most that tensors took; None: unknown
    resident_bytes: int | None = None  # byte of tensors between steps
    note: str = ""  # a remark for readers

    @staticmethod
    def key_of(name: str, phase: str, mode: str, sizes: Mapping[str, Any], scale: str = "") -> str:
        """The key of a step: "gpt2 small decode batch=4 kv=128 eager"."""
        shown = [f"{key}={value}" for key, value in sizes.items()]
        return " ".join(filter(None, (name, scale, phase, *shown, mode)))

    @property
    def median(self) -> float:
        """Median seconds of one step."""
        return statistics.median(self.seconds)

    @property
    def attributed(self) -> float:
        """Seconds of all `ops` together."""
        return sum(op.seconds for op in self.ops)


@dataclass(frozen=True, slots=True)
class Trouble:
    """A case that gave no row."""

    key: str
    reason: str
    failed: bool = True  # it was tried, and is not tried again; False: left out


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The measurements of one device."""

    device: Mapping[str, Any]  # name, type, memory, clocks and driver, as the device reports them
    versions: Mapping[str, str]  # of the libraries
    dates: tuple[str, ...] = ()  # YYYY-MM-DD of each start
    settings: Mapping[str, Any] = field(default_factory=dict)  # budget and choices
    micro: tuple[MicroRow, ...] = ()  # operations alone
    models: tuple[ModelRow, ...] = ()  # steps of models
    troubles: tuple[Trouble, ...] = ()  # cases without a row
    notes: tuple[str, ...] = ()  # conditions of the measurement
    # Graphs of the measured steps by key of their row, in the process that measured; not in a file.
    graphs: Mapping[str, OpGraph] = field(default_factory=dict, compare=False)

    def __repr__(self) -> str:
        name = self.device.get("name", "a device")
        rows = [f"{row.key} {format_time(row.median)}" for row in self.models]
        return short(
            self,
            f"{name}: {len(self.micro):,} operations, {len(rows):,} steps of models"
            f"{': ' if rows else ''}{some(rows)}; {len(self.troubles):,} without a time",
        )

    @property
    def errors(self) -> tuple[Trouble, ...]:
        """The cases that failed."""
        return tuple(trouble for trouble in self.troubles if trouble.failed)

    @property
    def skipped(self) -> tuple[Trouble, ...]:
        """The cases that were left out."""
        return tuple(trouble for trouble in self.troubles if not trouble.failed)

    @property
    def counts(self) -> str:
        """The numbers of rows, errors and left-out cases, in words."""
        return (
            f"{len(self.micro)} operations, {len(self.models)} model steps, "
            f"{len(self.errors)} errors, {len(self.skipped)} left out"
        )

    def done(self) -> set[str]:
        """Keys of the cases that were measured or have failed; they are not tried again."""
        rows = {row.key for row in self.micro} | {row.key for row in self.models}
        return rows | {trouble.key for trouble in self.errors}

    def with_row(self, row: MicroRow | ModelRow) -> Run:
        """The run with one more row, which replaces rows and troubles of the same key."""
        troubles = tuple(t for t in self.troubles if t.key != row.key)
        if isinstance(row, MicroRow):
            kept = tuple(other for other in self.micro if other.key != row.key)
            return replace(self, micro=(*kept, row), troubles=troubles)
        others = tuple(other for other in self.models if other.key != row.key)
        return replace(self, models=(*others, row), troubles=troubles)

    def with_trouble(self, key: str, reason: str, failed: bool = True) -> Run:
        """The run with a trouble of this key, which replaces earlier troubles of the key."""
        troubles = tuple(t for t in self.troubles if t.key != key)
        return replace(self, troubles=(*troubles, Trouble(key, reason, failed)))

    def __enter__(self) -> Run:
        """`with rooftrace.measure(model, x) as run:` has the run in its block."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing is open."""

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the run, compressed if `path` ends in .gz; nothing is left half-written."""
        path = Path(path)
        text = json.dumps(encoded(self), separators=(",", ":"), allow_nan=False).encode()
        write_packed(path, text)
        return path

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Run:
        """The run in a file.

        Raises FileNotFoundError, or ProfileError for a file that is cut off, damaged or of another
        kind or version.
        """
        data = json_of(text_of(Path(path), _KIND), str(path), _KIND)
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema != SCHEMA:
            raise _KIND.refused(str(path), f"schema is {schema!r:.60}, expected {SCHEMA!r}")
        return decoded(data, str(path))


# -- files -----------------------------------------------------------------------------------------


def encoded(run: Run) -> dict[str, Any]:
    """The run as plain JSON values."""
    data: dict[str, Any] = {"schema": SCHEMA, **_plain(run)}
    data["micro"] = [_plain(row) for row in run.micro]
    data["models"] = [
        {
            **_plain(row),
            "ops": [_plain(op) for op in row.ops],
            **({"kernels": [_plain(kernel) for kernel in row.kernels]} if row.kernels else {}),
        }
        for row in run.models
    ]
    data["troubles"] = [_plain(row) for row in run.troubles]
    return data


def decoded(data: Mapping[str, Any], where: str = "run") -> Run:
    """The run from values of `encoded`.  Raises ProfileError for others, which names `where`."""
    values = {name: value for name, value in data.items() if name != "schema"}
    for name in ("micro", "models", "troubles"):
        if name not in values:
            raise _KIND.refused(where, f"{name} is missing")
    if "graphs" in values:
        raise _KIND.refused(where, "unknown key 'graphs': a file of a run has no graphs")
    run = record_of(Run, values, where, _KIND)
    rows: tuple[MicroRow | ModelRow, ...] = (*run.micro, *run.models)
    for row in rows:
        times = row.seconds
        if not times or not all(math.isfinite(t) and t >= 0 for t in times):
            reason = f"{row.key!r:.60} has times {times!r:.60}, expected seconds of at least 0"
            raise _KIND.refused(where, reason)
    try:
        models = [replace(row, ops=tuple(map(_with_shapes, row.ops))) for row in run.models]
    except TypeError as error:
        raise _KIND.refused(where, str(error)) from None
    return replace(run, models=tuple(models))


def _with_shapes(op: OpTime) -> OpTime:
    return replace(op, shapes=tuple(map(_shape, op.shapes))) if op.shapes else op


def _shape(item: Any) -> tuple[Any, ...]:
    """The sizes of an operand, or those of each tensor in a list.  Raises TypeError for others."""
    if isinstance(item, (list, tuple)):
        if all(type(size) is int and size >= 0 for size in item):
            return tuple(item)
        if all(isinstance(inner, (list, tuple)) for inner in item):
            return tuple(map(_shape, item))
    raise TypeError(f"shapes of an op have {item!r:.60}, expected a list of sizes")


def _plain(record: Any) -> dict[str, Any]:
    """The fields of a record that are not at their defaults."""
    return {
        item.name: value
        for item in fields(record)
        if item.name != "graphs"
        and ((value := getattr(record, item.name)) != item.default or item.name == "failed")
    }
