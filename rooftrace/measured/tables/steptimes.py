"""Step times from a table: a plain CSV with one measured step in each line.

Columns may come in any order and case; a prefix "infer_" or "train_" is dropped, so that tables of
timm's benchmark read as they are.  Spaces and dashes count as underscores.

  target      model, target, name                        what ran; required
  time        ms | step_ms | latency_ms | step_time_ms | step_time (ms, as timm writes it)
              us | step_us | latency_us,  s | seconds | step_s | step_seconds
              samples_per_sec | items_per_s (with batch)   one of these is required
  batch       batch, batch_size, bs
  seq, kv     seq, seq_len, sequence, isl;   kv, kv_len, cache
  image_size  image_size, img_size, size                 pixels of one side
  phase       phase;  "forward" for infer_ columns, "training" for train_ columns
  dtype       dtype, precision
  execution   execution, mode, backend
  chip        chip, device, gpu

Other columns are kept as text in `extra`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rooftrace.errors import ProfileError
from rooftrace.measured.tables import tabular

_TEXT = {
    "target": ("model", "target", "name"),
    "phase": ("phase",),
    "dtype": ("dtype", "precision"),
    "execution": ("execution", "mode", "backend"),
    "chip": ("chip", "device", "gpu"),
}
_WHOLE = {
    "batch": ("batch", "batch_size", "bs"),
    "seq": ("seq", "seq_len", "sequence", "isl"),
    "kv": ("kv", "kv_len", "cache"),
    "image_size": ("image_size", "img_size", "size"),
}
# Names of a time, and its unit in seconds.
_TIMES = {
    1e-3: ("ms", "step_ms", "latency_ms", "time_ms", "step_time_ms", "step_time"),
    1e-6: ("us", "step_us", "latency_us", "time_us", "step_time_us"),
    1.0: ("s", "seconds", "step_s", "step_seconds", "latency_s", "time_s", "step_time_s"),
}
_RATES = ("samples_per_sec", "samples_per_s", "items_per_s", "images_per_s")
_PREFIXES = {"infer_": "forward", "train_": "training"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One measured step of a table.  A field that the table does not have is None."""

    target: str  # what ran, as the table names it
    seconds: float  # s, of one step
    batch: int | None = None
    seq: int | None = None
    kv: int | None = None
    image_size: int | None = None  # pixels of one side
    phase: str | None = None
    dtype: str | None = None
    execution: str | None = None  # how it ran
    chip: str | None = None  # where it ran
    line: int = 0  # of the file
    extra: Mapping[str, str] = field(default_factory=dict)  # other columns, by name


@dataclass(frozen=True, slots=True)
class _Columns:
    """The columns of the header by their meaning."""

    text: Mapping[str, str]
    whole: Mapping[str, str]
    time: str
    unit: float | None  # seconds; None where the column holds items per second
    phase: str | None


def read_steps(path: str | os.PathLike[str], skip_empty: bool = False) -> tuple[StepTime, ...]:
    """The steps in a CSV file, in order.

    skip_empty: leave out lines without a time (runs that failed).

    Raises FileNotFoundError, or ProfileError naming line and column for a column that is missing
    or there twice, and for a cell that is empty, not a number, negative or not finite.
    """
    path = Path(path)
    rows = tabular.lines(path)
    first = next(rows, None)
    if first is None:
        raise ProfileError(f"{path}: the file is empty; expected a header such as model,batch,ms")
    line, header = first
    tabular.check_header(path, line, header)
    columns = _columns(path, line, header)
    table = ((n, tabular.cells(path, n, header, row)) for n, row in rows)
    steps = tuple(
        _step(path, n, row, columns) for n, row in table if row[columns.time] or not skip_empty
    )
    if not steps:
        raise ProfileError(f"{path}: no steps after the header in line {line}")
    return steps


def _columns(path: Path, line: int, header: Sequence[str]) -> _Columns:
    plain: dict[str, str] = {}
    phase = None
    for name in header:
        short = name.lower().replace(" ", "_").replace("-", "_")
        for prefix, meaning in _PREFIXES.items():
            if short.startswith(prefix):
                short, phase = short.removeprefix(prefix), meaning
        if short in plain:
            raise ProfileError(
                f"{path}: line {line}: columns {plain[short]!r:.60} and {name!r:.60} say the same: "
                "keep one of them"
            )
        plain[short] = name

    def pick(meaning: str, spellings: Sequence[str]) -> str | None:
        columns = [plain[s] for s in spellings if s in plain]
        if len(columns) > 1 and meaning != "target":
            raise ProfileError(
                f"{path}: line {line}: columns {columns[0]!r:.60} and {columns[1]!r:.60} both say "
                f"{meaning}: keep one of them"
            )
        return columns[0] if columns else None

    text = {key: column for key, names in _TEXT.items() if (column := pick(key, names))}
    whole = {key: column for key, names in _WHOLE.items() if (column := pick(key, names))}
    if "target" not in text:
        raise ProfileError(
            f"{path}: line {line}: no column for what ran (model, target or name) among "
            f"{', '.join(header):.300}"
        )
    units = {name: unit for unit, names in _TIMES.items() for name in names}
    time = pick("the time", tuple(units))
    if time is not None:
        unit = next(units[s] for s in units if plain.get(s) == time)
        return _Columns(text, whole, time, unit, phase)
    rate = pick("the rate", _RATES)
    if rate is None:
        raise ProfileError(
            f"{path}: line {line}: no column for the time (ms, us, s, seconds, step_ms, "
            f"samples_per_sec ...) among {', '.join(header):.300}"
        )
    if "batch" not in whole:
        raise ProfileError(
            f"{path}: line {line}: {rate!r:.60} gives a step time only with a column batch"
        )
    return _Columns(text, whole, rate, None, phase)


def _step(path: Path, line: int, row: Mapping[str, str], columns: _Columns) -> StepTime:
    text = {key: row[name] or None for key, name in columns.text.items()}
    if not text["target"]:
        raise ProfileError(
            f"{path}: line {line}, column {columns.text['target']!r:.60}: the cell is empty; "
            "expected what ran"
        )
    whole = {key: tabular.whole(path, line, name, row[name]) for key, name in columns.whole.items()}
    if not row[columns.time]:
        raise ProfileError(
            f"{path}: line {line}, column {columns.time!r:.60}: the cell is empty; expected a "
            "number above 0 (read_steps(..., skip_empty=True) leaves out runs that failed)"
        )
    unit = 1.0 if columns.unit is None else columns.unit
    seconds = tabular.number(path, line, columns.time, row[columns.time], unit=unit)
    if columns.unit is None:
        batch = whole["batch"]
        if not batch or not 0 < batch / seconds < math.inf:
            column = columns.whole["batch"]
            state = f"{row[column]!r:.60}" if row[column] else "the cell is empty"
            raise ProfileError(
                f"{path}: line {line}, column {column!r:.60}: {state}, and {columns.time!r:.60} "
                "gives a step time only with a batch"
            )
        seconds = batch / seconds
    used = {*columns.text.values(), *columns.whole.values(), columns.time}
    return StepTime(
        target=str(text["target"]),
        seconds=seconds,
        batch=whole.get("batch"),
        seq=whole.get("seq"),
        kv=whole.get("kv"),
        image_size=whole.get("image_size"),
        phase=text.get("phase") or columns.phase,
        dtype=text.get("dtype"),
        execution=text.get("execution"),
        chip=text.get("chip"),
        line=line,
        extra={name: cell for name, cell in row.items() if name not in used},
    )
