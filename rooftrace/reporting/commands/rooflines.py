"""Steps of several models on one roofline: FLOP/s over FLOP/byte, on each chip, over one size."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rooftrace._progress import tell, telling
from rooftrace.costmodels.estimates import estimate
from rooftrace.costmodels.fusion import ExecutionModel, plan
from rooftrace.errors import RequestError
from rooftrace.graph import OpGraph
from rooftrace.hardware import Chip
from rooftrace.reporting.commands.calls import conditions_of
from rooftrace.reporting.commands.estimates import Source
from rooftrace.reporting.commands.pricing import PricingOptions, check_groups
from rooftrace.reporting.commands.requests import priced
from rooftrace.reporting.commands.rooflinesteps import (
    RooflineRow,
    Rooflines,
    check_names,
    sizes_run,
)
from rooftrace.tracer import Job
from rooftrace.tracer.names import check_named

MOST = 200
"""Steps of one figure at most."""


def roofline(
    sources: Source | Sequence[Source],
    *,
    batch: int | Sequence[int] | None = None,
    seq: int | Sequence[int] | None = None,
    kv: int | Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> Rooflines:
    """Steps of several models under the roofs of several chips.

    sources: targets, graphs, or graphs by phase.  batch, seq, kv: a size, or several values of one
    of them; each value is traced, and `plot` joins its points.  phases: by default those
    that fit each source.  names: one for each source, in tables and figures; default: those of
    the models.  dtype, weights_dtype, kv_dtype and other arguments of `report` hold for all.

    Returns the Rooflines: print it, `.to_frame()`, `.plot(path)`.  Raises RequestError for no
    source, names that are not one for each, several values of two sizes, and the errors of
    `report`.
    """
    several = [sources] if _is_one(sources) else list(sources)
    if not several:
        raise RequestError("roofline(sources=...): expected at least one target, got none")
    check_names(names, several)
    steps, over = _steps({"batch": batch, "seq": seq, "kv": kv})
    pricing, others = PricingOptions.parted(kwargs)
    (model,), chips = conditions_of(roofline, pricing, *several)
    jobs = [
        (source, sizes, Job.of(roofline, source, (), {**others, **sizes}))
        for source in several
        for sizes in steps
    ]
    for _, _, job in jobs:
        if job.is_named:
            check_named(job.name)
    if len(jobs) * len(chips) > MOST:
        raise RequestError(
            f"{len(jobs) * len(chips):,} steps: expected {MOST} at most on one roofline; "
            "`rooftrace sweep` has tables of millions"
        )
    traced: list[tuple[Source, Mapping[str, int], dict[str, OpGraph]]] = []
    with telling(progress):
        for number, (source, sizes, job) in enumerate(jobs, 1):
            tell(f"step {number} of {len(jobs)}")
            graphs = dict(priced(job).graphs)
            check_groups(graphs.values, [model])
            traced.append((source, sizes, graphs))
        own = [name for name in names or () for _ in steps]
        rows = list(_rows(traced, own or _names(several, traced), chips, model))
    return Rooflines(tuple(rows), over)


def _is_one(sources: Any) -> bool:
    return isinstance(sources, (str, os.PathLike, OpGraph, Mapping)) or not isinstance(
        sources, Sequence
    )


def _rows(
    traced: Sequence[tuple[Source, Mapping[str, int], Mapping[str, OpGraph]]],
    names: Sequence[str],
    chips: Sequence[Chip],
    model: ExecutionModel,
) -> Iterator[RooflineRow]:
    for name, (_, sizes, graphs) in zip(names, traced, strict=True):
        for graph in graphs.values():
            planned = plan(graph, model)
            for step in (estimate(planned, chip) for chip in chips):
                yield RooflineRow(name, {**sizes_run(step), **sizes}, step)


def _names(
    sources: Sequence[Source], traced: Sequence[tuple[Source, Any, Mapping[str, OpGraph]]]
) -> list[str]:
    """A name for each trace: that of the model, with a number where several sources share it."""
    by_source: dict[int, str] = {}
    for source, _, graphs in traced:
        first = next(iter(graphs.values()))
        by_source.setdefault(id(source), str(first.model.get("name") or "model"))
    used: dict[str, list[int]] = {}
    for source in sources:
        used.setdefault(by_source[id(source)], []).append(id(source))
    for name, owners in used.items():
        for number, owner in enumerate(dict.fromkeys(owners), 1):
            if len(set(owners)) > 1:
                by_source[owner] = f"{name} {number}"
    return [by_source[id(source)] for source, _, _ in traced]


def _steps(sizes: Mapping[str, Any]) -> tuple[list[dict[str, int]], str]:
    """The sizes of each step, and the size that has several values."""
    values = {name: _values(name, value) for name, value in sizes.items() if value is not None}
    several = [name for name, numbers in values.items() if len(numbers) > 1]
    if len(several) > 1:
        raise RequestError(
            f"{' and '.join(several)} have several values each: a line is drawn over one size"
        )
    fixed = {name: numbers[0] for name, numbers in values.items() if name not in several}
    if not several:
        return [fixed], ""
    (over,) = several
    return [{**fixed, over: number} for number in values[over]], over


def _values(name: str, value: Any) -> list[int]:
    numbers = [value] if isinstance(value, int) else list(value)
    wrong = [n for n in numbers if isinstance(n, bool) or not isinstance(n, int) or n < 1]
    if not numbers or wrong:
        shown = repr(wrong[0]) if wrong else "none"
        raise RequestError(f"{name}={shown}: expected whole numbers above 0, for example 1, 8, 64")
    return sorted(set(numbers))
