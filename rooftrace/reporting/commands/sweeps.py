"""Sweeps of a source: forms of all its variants, evaluated part by part, kept as they come."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rooftrace._outputs import MADE_BY
from rooftrace._progress import tell, telling
from rooftrace._writing import put_bytes, write_bytes
from rooftrace.costmodels.estimates import estimate
from rooftrace.errors import RequestError
from rooftrace.graph import OpGraph
from rooftrace.hardware.chip import MissingPeakError
from rooftrace.hardware.units import format_time
from rooftrace.reporting.commands.arguments import SweepArguments
from rooftrace.reporting.commands.estimates import Source
from rooftrace.reporting.commands.options import taken
from rooftrace.reporting.commands.pricing import check_groups
from rooftrace.reporting.commands.requests import StepRequest
from rooftrace.reporting.commands.stepforms import (
    MOST_TRACES,
    form_of,
    known_form,
    levels_of,
)
from rooftrace.studies.forms import Conditions, Points
from rooftrace.studies.sweeps import Form, Sweep, SweepCase, evaluated, points_of
from rooftrace.tracer import Job
from rooftrace.tracer.phases import TraceCache

_AT_ONCE = 1 << 18
"""Points of a part."""
_MOST = 50_000_000
"""The most lines of a sweep."""
FORMATS = (".parquet", ".csv")


@dataclass(frozen=True, kw_only=True)
class SweepRequest(StepRequest):
    """The request of a sweep: of one phase, with levels by size, and variants."""

    levels: Mapping[str, Sequence[int]]
    variants: tuple[Mapping[str, Any], ...] = ({},)
    most: int = MOST_TRACES

    @property
    def points(self) -> int:
        """Points of the grid."""
        return math.prod(map(len, self.levels.values()))

    @property
    def lines(self) -> int:
        """Lines of the table."""
        return self.points * len(self.chips) * len(self.conditions) * len(self.variants)

    def check(self) -> None:
        """Raise RequestError for more lines than a table can have."""
        if self.lines > _MOST:
            raise RequestError(
                f"{self.lines:,} lines: expected {_MOST:,} at most; take steps, as "
                "--over kv=2048..131072:x2"
            )


def sweep(
    source: Source,
    *args: Any,
    out: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> Sweep:
    """The cost of a step over ranges of its sizes, on each chip, from a handful of traces.

    source: a module, a target, a `Form` or the file of one.  over: the sizes and their values, as
    for `form`.  vary: settings of the source, each with several values; each combination is traced
    by itself.  chip, execution, dtype, kv_dtype: one or several.  out: a .parquet or .csv file;
    finished parts are kept with the traces until it is complete, and the same call resumes there.

    Returns the Sweep: `.frame()`, `.crossings()`, `.cliffs()`, `.best()`.  Raises RequestError for
    an unknown size, an empty range, and the errors of `form`.
    """
    request = sweep_request(source, args, **kwargs)
    with telling(progress):
        return swept(request, None if out is None else Path(out))


def sweep_request(source: Source, args: Sequence[Any] = (), /, **kwargs: Any) -> SweepRequest:
    """The request of a call of `sweep`, checked; nothing is traced.  Raises RequestError."""
    arguments, kwargs = taken(SweepArguments, kwargs)
    levels = levels_of(arguments.over or ())
    request = StepRequest.of(sweep, source, args, kwargs, form=known_form(source))
    request.job.refuse(levels, "its values are those of `over`; leave it out")
    return SweepRequest(
        **vars(request.of_one_phase()),
        levels=levels,
        variants=tuple(variants_of(arguments.vary or {})),
        most=arguments.most,
    )


def variants_of(vary: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Every combination of settings.  Raises RequestError for a setting without values."""
    for name, values in vary.items():
        if isinstance(values, str) or not len(values):
            raise RequestError(f"vary {name}={values!r}: expected several values, as [2, 4, 8]")
    for combination in itertools.product(*vary.values()):
        yield dict(zip(vary, combination, strict=True))


def swept(request: SweepRequest, out: Path | None = None) -> Sweep:
    """The sweep of a request.  out: its file; parts are kept until all are there."""
    import numpy as np

    request.check()
    if out is not None and out.suffix not in FORMATS:
        raise RequestError(f"{out}: expected a name that ends in {' or '.join(FORMATS)}")
    parts = None if out is None else TraceCache.usual().private()
    done: list[Path] = []
    cases: list[SweepCase] = []
    tables = []
    seen = partial(_tell_first, request) if request.points > 1 else None
    for settings in request.variants:
        job = _with(request.job, settings)
        form = request.form or form_of(job, request.levels, request.most, seen)
        seen = None
        _check_names(form, request.levels)
        check_groups(
            partial(_some_graphs, form, request.levels), [c.execution for c in request.conditions]
        )
        grid = points_of(form.names, request.levels)
        for conditions in request.conditions:
            case = SweepCase(form, conditions, settings)
            for number, start in enumerate(range(0, len(grid), _AT_ONCE)):
                some = grid.where(np.arange(start, min(start + _AT_ONCE, len(grid))))
                name = "" if parts is None else _name_of(form, some, request, conditions)
                part = parts / f"{name}.npz" if parts is not None and name else None
                table = None if part is None else _kept(part)
                if table is None:
                    tell(f"pricing {form.title}, {conditions.execution.name}: part {number + 1}")
                    table = evaluated(form, some, request.chips, conditions)
                if part is not None:
                    _keep(part, table)
                    done.append(part)
                table["case"] = np.full(len(table["chip"]), len(cases), dtype=np.int16)
                tables.append(table)
            cases.append(case)
    # Parts go as their columns are joined: a large table is in memory once.
    joined = list(tables[0])
    columns = {name: np.concatenate([table.pop(name) for table in tables]) for name in joined}
    names = tuple(request.levels)
    result = Sweep(names, tuple(cases), request.chips, columns, request.lines)
    if out is not None:
        write_sweep(result, out)
    for part in done:
        part.unlink(missing_ok=True)
    return result


def _tell_first(request: SweepRequest, sizes: str, graph: OpGraph) -> None:
    """Report the time of the first traced step on the first chip: the rest takes longer."""
    chip, conditions = request.chips[0], request.conditions[0]
    with contextlib.suppress(MissingPeakError):  # raised where all points are evaluated
        step = estimate(conditions.plan(graph), chip)
        tell(
            f"first step, {sizes}: {format_time(step.t_est)} on {chip.name}, "
            f"limited by {step.times.regime}"
        )


def _some_graphs(form: Form, levels: Mapping[str, Sequence[int]]) -> list[OpGraph]:
    if form.regimes:
        return [form.example]
    return [form.graph(**{name: levels[name][0] for name in form.names})]


def _check_names(form: Form, levels: Mapping[str, Sequence[int]]) -> None:
    """Raise RequestError unless there are values for the sizes of a form, and for no others."""
    for name in levels:
        form.numbers({name: 1, **dict.fromkeys(form.names, 1)})
    for name in form.names:
        if name not in levels:
            raise RequestError(
                f"size {name!r} has no values: this form is over {', '.join(form.names)}; for "
                f"example over={{..., {name!r}: 1}}"
            )


def _with(job: Job, settings: Mapping[str, Any]) -> Job:
    if not settings:
        return job
    request = replace(job.request, settings={**job.request.settings, **settings})
    return replace(job, request=request)


def write_sweep(result: Sweep, out: Path) -> None:
    """Write the table of a sweep as parquet or CSV, atomically."""
    frame = result.frame()
    if out.suffix == ".csv":
        write_bytes(out, frame.to_csv(index=False).encode())
        return
    if importlib.util.find_spec("pyarrow") is None:
        raise RequestError(
            f"{out}: parquet needs pyarrow: pip install 'rooftrace[parquet]', or name a .csv file"
        )
    for name, column in frame.items():
        if column.dtype == object and isinstance(column.iloc[0], int):  # beyond 64 bits
            frame[name] = column.astype(float)
    packed = io.BytesIO()
    frame.attrs.update(MADE_BY)
    frame.to_parquet(packed, index=False)
    write_bytes(out, packed.getvalue())


# -- parts -----------------------------------------------------------------------------------------


def _name_of(form: Form, some: Points, request: SweepRequest, conditions: Conditions) -> str:
    """The name of a part: a digest of the sources of its numbers; "" where it is not kept.

    A form without regimes is traced point by point, and has no record of its source.
    """
    if not form.regimes:
        return ""
    digest = hashlib.sha256(form.encoded())
    digest.update(repr((conditions, [chip.to_dict() for chip in request.chips])).encode())
    for name, column in zip(some.names, some.columns, strict=True):
        digest.update(name.encode() + column.tobytes())
    return digest.hexdigest()[:32]


def _kept(part: Path) -> dict[str, Any] | None:
    """The columns of a part that is there."""
    import zlib
    from zipfile import BadZipFile

    import numpy as np

    try:
        packed = io.BytesIO(part.read_bytes())
        with np.load(packed, allow_pickle=False) as file:
            return {column: file[column] for column in file.files}
    except (OSError, ValueError, EOFError, KeyError, BadZipFile, zlib.error):
        return None  # cut off, or of another version: it is made again


def _keep(part: Path, table: Mapping[str, Any]) -> None:
    import numpy as np

    if part.exists() or any(column.dtype == object for column in table.values()):
        return
    packed = io.BytesIO()
    np.savez(packed, **table)
    with contextlib.suppress(OSError):  # a full disk keeps nothing
        put_bytes(part, packed.getvalue())
