"""What changed between two measured runs: `rooftrace.diff` of traces and run files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rooftrace._progress import tell, telling
from rooftrace.costmodels.registry import own_rules
from rooftrace.costmodels.rewriting import check_precisions
from rooftrace.errors import RequestError, UnusedError, naming
from rooftrace.measured.rundiffs import RunDiff, RunQuestion, diff_runs, is_measured
from rooftrace.reporting.estimates import Source
from rooftrace.reporting.requests.calls import conditions_of
from rooftrace.reporting.requests.pricing import CHANGES, PLAIN, PricingOptions
from rooftrace.reporting.traces import in_precisions, priced
from rooftrace.tracer.asking import Job
from rooftrace.tracer.asking.names import configs
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.sources.apart import trace_each_apart

Graphs = Mapping[str, OpGraph]
_SIZES = "a measured run is what it is; this is for what --target names (in Python: graphs=)"


def diff_measured(
    before: Any,
    after: Any,
    args: Sequence[Any] = (),
    *,
    graphs: Any = None,
    names: tuple[str, str] | None = None,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> RunDiff:
    """What changed from one measured run to another; see `rooftrace.diff`.

    graphs: what ran: a graph, graphs by phase, a module or a target, or two of them, one for each
    side; targets at the sizes in `kwargs`.  Raises RequestError where only one side is measured.
    """
    for one_side, other in ((before, after), (after, before)):
        if not is_measured(one_side):
            if isinstance(one_side, (str, os.PathLike)) and not _may_be_target(one_side):
                raise RequestError(f"{_shown(one_side)}: there is no such file")
            raise RequestError(
                f"{_shown(other)} is measured and {_shown(one_side)} is not: give two measured "
                "runs, or two graphs; `rooftrace validate` sets a measurement beside what is "
                f"predicted: rooftrace validate {_shown(other)} --target {_shown(one_side)}"
            )
    if args:
        raise RequestError(f"diff of two measured runs: nothing takes the argument {args[0]!r:.60}")
    sources = _two(graphs)
    pricing, asked = PricingOptions.parted(kwargs)
    if sources is None and asked.keys() - {"phases"}:
        name = min(asked.keys() - {"phases"})
        raise UnusedError(name, f"{asked[name]!r:.60}", _SIZES)
    changed = [name for name in CHANGES if getattr(pricing, name) != getattr(PLAIN, name)]
    if changed and pricing.execution is None:
        raise RequestError(
            f"{changed[0]} (--{changed[0].replace('_', '-')}): it changes an execution model; say "
            "with --execution how the runs ran"
        )
    models, chips = conditions_of(diff_measured, pricing)
    with telling(progress):
        made = (None, None) if sources is None else _made(sources, asked)
        question = RunQuestion(
            graphs=made,
            chip=chips[0] if pricing.chip is not None or pricing.system is not None else None,
            execution=None if pricing.execution is None else models[0],
            phases=asked.get("phases"),
            names=names,
            tell=tell,
        )
        return diff_runs(before, after, question)


def _may_be_target(source: str | os.PathLike[str]) -> bool:
    """Whether a name is a file, or may name code or a config."""
    return os.path.exists(source) or ":" in os.fspath(source) or os.fspath(source) in configs()


def _shown(source: Any) -> str:
    return os.fspath(source) if isinstance(source, (str, os.PathLike)) else f"{source!r:.60}"


def _two(graphs: Any) -> tuple[Source, Source] | None:
    """What ran on each side; None where nobody says it."""
    if graphs is None:
        return None
    if not isinstance(graphs, (tuple, list)):
        return graphs, graphs
    if len(graphs) not in (1, 2):
        raise RequestError(f"graphs: {len(graphs)} of them: expected one, or one for each side")
    return graphs[0], graphs[-1]


def _made(sources: tuple[Source, Source], kwargs: Mapping[str, Any]) -> tuple[Graphs, Graphs]:
    """The graphs of both sides by phase; code runs in a process of its own, rules hold inside."""
    distinct = sources[:1] if sources[0] is sources[1] or sources[0] == sources[1] else sources
    jobs = [Job.of(diff_measured, source, (), kwargs) for source in distinct]
    for job in jobs:
        check_precisions(*job.precisions)
    code = [job for job in jobs if job.is_code]
    apart = iter(trace_each_apart(code))
    made: list[Graphs] = []
    for job in jobs:
        traced = next(apart) if job.is_code else None
        with own_rules(), naming(job.name):
            made.append((priced(job) if traced is None else in_precisions(job, traced)).graphs)
    return made[0], made[-1]
