"""Forms of a source, valid at any size, and sweeps: their values over ranges of sizes."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import itertools
import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rooftrace._amounts import np
from rooftrace._outputs import MADE_BY
from rooftrace._progress import tell, telling
from rooftrace._writing import put_bytes, write_bytes
from rooftrace.costmodels.estimates import estimate
from rooftrace.errors import RequestError
from rooftrace.graph import GraphFileError, OpGraph
from rooftrace.graph.formulas import Survey
from rooftrace.graph.formulas.leaves import Numbers
from rooftrace.hardware.chip import MissingPeakError
from rooftrace.hardware.units import format_time
from rooftrace.reporting.commands.arguments import SweepArguments
from rooftrace.reporting.commands.estimates import Source
from rooftrace.reporting.commands.options import taken
from rooftrace.reporting.commands.pricing import check_groups
from rooftrace.reporting.commands.requests import StepRequest
from rooftrace.reporting.renderers import words
from rooftrace.studies.forms import Conditions, Points
from rooftrace.studies.sweeps import Form, Sweep, SweepCase, evaluated, looks_like_form, points_of
from rooftrace.tracer import Job
from rooftrace.tracer.phases import TraceCache

if TYPE_CHECKING:
    from rooftrace.tracer.phases import SizedSource

Built = TypeVar("Built")
Levels = Mapping[str, Sequence[int]]
"""The values of each size, in rising order."""
LONGEST = 131_072
USUAL: Mapping[str, range] = {
    "batch": range(1, 1025),
    "seq": range(16, LONGEST + 1),
    "kv": range(16, LONGEST + 1),
}
"""The default values of sizes; seq and kv as far as the model takes them."""
MOST_TRACES = 100


def form(
    source: Source,
    *args: Any,
    over: Sequence[str] | Mapping[str, Any] = ("batch",),
    phase: str | None = None,
    most: int = MOST_TRACES,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> Form:
    """The step of a source with some of its sizes left open.

    over: names of the sizes, or for each its values: a range, a list, or a text as "1..1024" or
    "256..65536:x2".  Sizes are batch, seq, kv, integers of a config ("config.num_hidden_layers"),
    keywords of the function that a target names, names in the shapes of `inputs`, and dimensions
    of the arguments of a call ("x.1").  phase: prefill, decode, forward (default) or training.
    most: of traces.  Other arguments are those of `trace`.

    Raises RequestError for a size that there is not, an empty range, and a size that the model
    cannot take; and the errors of `trace`.
    """
    job = Job.of(form, source, args, kwargs, phase=phase).of_one_phase()
    levels = levels_of(over)
    job.refuse(levels, "its values are those of `over`; leave it out")
    later = "a form has the model's own precisions; `sweep`, `solve` and its `estimate` take others"
    job.refuse(("weights_dtype", "kv_dtype"), later)
    with telling(progress):
        return form_of(job, levels, most)


def form_of(
    job: Job,
    levels: Levels,
    most: int = MOST_TRACES,
    seen: Callable[[str, OpGraph], None] | None = None,
    asked: Levels | None = None,
) -> Form:
    """The form of a job of one phase over these levels.

    seen: called with the sizes and the graph of the first trace.  asked: of some sizes, the only
    levels that are asked for; others between them show how numbers grow.
    """
    from rooftrace.tracer.phases import SizedSource

    sized = SizedSource(job, tuple(levels))
    phase = _phase(job)

    def trace(numbers: Numbers) -> OpGraph:
        nonlocal seen
        text = ", ".join(f"{n} {size:,}" for n, size in zip(sized.names, numbers, strict=True))
        tell(f"tracing {text}")
        graph = sized.graphs(numbers)[phase] if phase else _only(sized.graphs(numbers))
        if seen is not None:
            seen(text, graph)
            seen = None
        return graph

    usual = [values is USUAL.get(name) for name, values in levels.items()]  # and bounded
    key = "form", sized.names, *map(repr, levels.values()), usual, most, repr(asked)
    file = sized.kept_file(*key)
    if file is not None:
        with contextlib.suppress(OSError, GraphFileError):  # damaged: it is made again
            return replace(Form.load(file), trace=trace)
    bounded = {name: _bounded(sized, name, values, levels) for name, values in levels.items()}
    survey = Survey(
        names=sized.names,
        levels=tuple(bounded.values()),
        trace=lambda many: list(map(trace, many)),
        most=most,
        asked=tuple((asked or {}).get(name, ()) for name in sized.names),
    )
    with sized.standing():
        regimes = tuple(survey.regimes())
    first = regimes[0].form.example if regimes else None
    made = Form(
        title=str(first.model.get("name") or "model") if first else job.name,
        phase=str(first.phase) if first else phase,
        names=sized.names,
        regimes=regimes,
        trace=trace,
    )
    if regimes:
        sized.keep(made.encoded(), *key)
    return made


def decoding_first(job: Job, build: Callable[[Job], Built], must_decode: bool = False) -> Built:
    """Build one phase of a job: the decode step, if none is named and the source has one.

    must_decode: raise the error of that decode step, and build nothing else.
    """
    from rooftrace.errors import TraceError

    if job.phases is None and job.is_config_or_program:
        try:
            return build(replace(job, phases=("decode",)))
        except (RequestError, TraceError):
            if must_decode:
                raise
    return build(job.of_one_phase())


def known_form(source: Any) -> Form | None:
    """The form that a source is, or whose file it names; None of any other source."""
    if isinstance(source, Form):
        return source
    named = isinstance(source, (str, os.PathLike))
    return Form.load(source) if named and looks_like_form(source) else None


def _phase(job: Job) -> str:
    return job.phases[0] if job.phases else ""


def _only(graphs: Mapping[str, OpGraph]) -> OpGraph:
    (graph,) = graphs.values()
    return graph


def _bounded(sized: SizedSource, name: str, values: Sequence[int], levels: Levels) -> Sequence[int]:
    """The values of a size; default ones without those that are too long for the model."""
    from rooftrace.errors import TraceError

    if not isinstance(values, range) or values is not USUAL.get(name) or name == "batch":
        return values
    values = lengths_in(sized.job, name, values)
    low = {other: min(levels[other]) for other in levels}

    def taken(length: int) -> bool:
        try:
            sized.graphs([length if other == name else low[other] for other in levels])
        except (RequestError, TraceError):
            return False
        return True

    if taken(values[-1]):
        return values
    good, bad = 0, len(values) - 1
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if taken(values[middle]) else (good, middle)
    return values[: good + 1]


def lengths_in(job: Job, name: str, values: range) -> range:
    """The values of a size; of a sequence those that its processes share evenly.

    Processes of "cp" have two chunks each.  Where a model trains, those of "tp" share the positions
    of each of "cp", too: see `cut_sequences`.
    """
    mesh, trains = job.request.mesh, "training" in (job.phases or ())
    around = mesh.get("cp", 1)
    chunks = 2 * around if around > 1 else 1
    if trains and job.request.plan == "engines":
        chunks = math.lcm(chunks, around * mesh.get("tp", 1))
    if name != "seq" or chunks == 1 or job.is_code:
        return values
    return range(-(-values.start // chunks) * chunks, values.stop, chunks)


# -- levels ----------------------------------------------------------------------------------------

_LARGEST = 1 << 53
_MOST_LEVELS = 1_000_000
"""Values of a size, where they are no range with a step."""


def levels_of(over: Sequence[str] | Mapping[str, Any]) -> dict[str, Sequence[int]]:
    """The levels of each size by its name.  Raises RequestError for an empty or a strange range."""
    if isinstance(over, str):
        over = (over,)
    named: dict[str, Sequence[int]] = {}
    if isinstance(over, Mapping):
        named = {str(name): level_values(str(name), values) for name, values in over.items()}
    else:
        for name in over:
            if name not in USUAL:
                raise RequestError(
                    f"over={name!r}: say its values too, for example over={{{name!r}: (1, 64)}} or "
                    f'{{{name!r}: "1..64"}}; only {", ".join(USUAL)} have usual ones'
                )
            named[name] = USUAL[name]
    if not named:
        raise RequestError("over is empty: name at least one size, for example batch")
    return named


def level_values(name: str, values: Any) -> Sequence[int]:
    """The values of one size: of a range, a list, a number, or a text such as "1..64:x2"."""
    if values is None:
        return levels_of((name,))[name]
    if isinstance(values, str):
        levels = _parsed(name, values)
    elif isinstance(values, range):
        levels = values if values.step > 0 else values[::-1]
    elif isinstance(values, tuple) and len(values) == 2:
        first, last = (_number(name, values, value) for value in values)
        levels = range(first, last + 1)
    else:
        several = values if isinstance(values, Iterable) else (values,)
        levels = tuple(sorted({_number(name, values, value) for value in several}))
    if not levels:
        raise RequestError(f"--over {name}={_quoted(values)}: the range is empty")
    if levels[0] < 1:
        raise RequestError(f"--over {name}={_quoted(values)}: sizes are at least 1")
    if levels[-1] > _LARGEST:
        raise RequestError(f"--over {name}={_quoted(values)}: sizes are at most {_LARGEST:,}")
    return levels


def _quoted(values: Any) -> str:
    return f"{values!s:.60}"


def _number(name: str, values: Any, value: Any) -> int:
    """The value as an integer.  Raises RequestError for anything else."""
    try:
        if not isinstance(value, bool) and (not isinstance(value, float) or value.is_integer()):
            return operator.index(int(value) if isinstance(value, float) else value)
    except TypeError:
        pass
    raise RequestError(f"--over {name}={_quoted(values)}: {value!r:.30} is no whole number")


def _parsed(name: str, text: str) -> Sequence[int]:
    try:
        if ".." not in text:
            return tuple(sorted({_whole(part) for part in text.split(",")}))
        span, _, step = text.partition(":")
        first, last = (_whole(part) for part in span.split("..", 1))
        if step.startswith("x"):
            return _multiplied(first, last, float(step[1:]))
        return range(first, last + 1, _whole(step) if step else 1)
    except (ValueError, OverflowError):
        raise RequestError(
            f"--over {name}={text:.60}: expected numbers as 1,2,4, a range as 1..64, with a step "
            "as 1..64:8, or a factor as 256..65536:x2"
        ) from None


def _whole(text: str) -> int:
    return int(text.replace("_", "").strip())


def _multiplied(first: int, last: int, factor: float) -> tuple[int, ...]:
    if not 1 < factor < math.inf or first < 1 or last > _LARGEST:
        raise ValueError(factor)
    if math.log(max(last / first, 1)) / math.log(factor) > _MOST_LEVELS:
        raise ValueError(factor)
    levels, value = [], float(first)
    while round(value) <= last:
        levels.append(round(value))
        value *= factor
    return tuple(dict.fromkeys(levels))


# -- Sweeps of a source: forms of all its variants, evaluated part by part, kept as they come ------

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
            f"limited by {words.LIMITS[step.times.regime]}"
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

    try:
        packed = io.BytesIO(part.read_bytes())
        with np.load(packed, allow_pickle=False) as file:
            return {column: file[column] for column in file.files}
    except (OSError, ValueError, EOFError, KeyError, BadZipFile, zlib.error):
        return None  # cut off, or of another version: it is made again


def _keep(part: Path, table: Mapping[str, Any]) -> None:
    if part.exists() or any(column.dtype == object for column in table.values()):
        return
    packed = io.BytesIO()
    np.savez(packed, **table)
    with contextlib.suppress(OSError):  # a full disk keeps nothing
        put_bytes(part, packed.getvalue())
