"""Forms of a source: graphs with formulas, traced at a few sizes, valid at any."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from rooftrace._progress import tell, telling
from rooftrace.errors import NoCacheError, RequestError
from rooftrace.graph import OpGraph
from rooftrace.graph.formulas import (
    Survey,
)
from rooftrace.graph.formulas.leaves import Numbers
from rooftrace.reporting.commands.estimates import Source
from rooftrace.studies.sweeps import Form, looks_like_form
from rooftrace.tracer import Job

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
) -> Form:
    """The form of a job of one phase over these levels.

    seen: called with the sizes and the graph of the first trace.
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

    bounded = {name: _bounded(sized, name, values, levels) for name, values in levels.items()}
    survey = Survey(sized.names, tuple(bounded.values()), lambda many: list(map(trace, many)), most)
    regimes = tuple(survey.regimes())
    first = regimes[0].form.example if regimes else None
    return Form(
        title=str(first.model.get("name") or "model") if first else job.name,
        phase=str(first.phase) if first else phase,
        names=sized.names,
        regimes=regimes,
        trace=trace,
    )


def decoding_first(job: Job, build: Callable[[Job], Built], must_decode: bool = False) -> Built:
    """Build one phase of a job: the decode step, if none is named and the source has one.

    must_decode: raise the error of that decode step, and build nothing else.
    """
    from rooftrace.tracer import TraceError

    if job.phases is None and job.is_named and not job.is_code and not job.is_graph:
        try:
            return build(replace(job, phases=("decode",)))
        except (NoCacheError, RequestError, TraceError):
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
    from rooftrace.tracer import TraceError

    if values is not USUAL.get(name) or name == "batch":
        return values
    low = {other: min(levels[other]) for other in levels}

    def taken(length: int) -> bool:
        try:
            sized.graphs([length if other == name else low[other] for other in levels])
        except (RequestError, TraceError):
            return False
        return True

    if taken(values[-1]):
        return values
    good, bad = values[0], values[-1]
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if taken(middle) else (good, middle)
    return range(values[0], good + 1)


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
