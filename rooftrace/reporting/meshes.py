"""Questions about meshes, as calls: the best one of some chips, and how a step scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rooftrace._progress import telling
from rooftrace.costmodels.meshing import MeshAnswer, ScalingAnswer
from rooftrace.errors import RequestError
from rooftrace.reporting import meshsearch, questions as asking
from rooftrace.reporting.requests import StepRequest
from rooftrace.reporting.stepforms import level_values


def best_mesh(
    target: Any,
    *,
    chips: int | Sequence[int],
    over: Any = None,
    step: float | str | None = None,
    tpot: float | str | None = None,
    price: float | None = None,
    kept_free: float = 0.0,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> MeshAnswer:
    """Which mesh of so many chips has most items per second of a chip, of those that fit.

    target: a config, or code that builds a module over a mesh; each candidate is a trace of its
    own, kept on disk.  chips: one number or several.  mesh: names the axes whose sizes are looked
    for (default dp and tp; tp stays within a node); schedule and microbatches go with pp.  over:
    batches of a replica to try.  step, tpot: limits in seconds, or as "30 ms", of a step and of a
    decode step.  checkpoint: default "full" where a step does not fit without.  price: dollar/hour
    of one chip.  kept_free: share of the memory.  Other arguments are those of `trace`.

    Raises RequestError where no mesh can be traced.  Where none fits and holds the limits, the
    answer has no `best`, and says what is nearest and how many chips are needed.
    """
    batches = (None,) if over is None else tuple(level_values(*asking.over_of(over, "batch")))
    asked = _question(
        best_mesh, target, kwargs, price, find="mesh", kept_free=kept_free,
        counts=asking.counts_of(chips), batches=batches, limits=asking.limits_of(step, tpot, None),
    )  # fmt: skip
    with telling(progress):
        return meshsearch.search(asked)


def scaling(
    target: Any,
    *,
    chips: int | Sequence[int] | None = None,
    price: float | None = None,
    kept_free: float = 0.0,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> ScalingAnswer:
    """A step on each number of chips (default 1 to 1,024): weak and strong scaling.

    mesh: the axes; replicas are added along the first one that is no pipeline.  Weak: each replica
    keeps its batch.  Strong: all chips do together what the most of them do in one step, in
    microbatches.  Other arguments are those of `best_mesh`.  Raises RequestError where no number
    of chips is a multiple of the other axes.
    """
    counts = meshsearch.USUAL_COUNTS if chips is None else asking.counts_of(chips)
    asked = _question(
        scaling, target, kwargs, price, find="scaling", kept_free=kept_free,
        counts=counts,
    )  # fmt: skip
    with telling(progress):
        return meshsearch.scaled(asked)


def _question(
    function: Callable[..., Any], target: Any, named: Mapping[str, Any], price: float | None,
    **question: Any,
) -> meshsearch.MeshQuestion:  # fmt: skip
    find = question["find"]
    if named.get("system") is None:
        raise RequestError(f"--find {find}: name how chips are joined, as --system dgx-h100")
    if named.get("chip") is not None:
        raise RequestError(f"--chip with --find {find}: it has no use for it; name a --system")
    phases = {} if {"phase", "phases"} & named.keys() else {"phase": "training"}
    request = StepRequest.of(function, target, (), {**phases, **named})
    joined = request.chip.system
    assert joined is not None  # the chip is that of a system
    prices = asking.own_numbers("price", price, [joined.chip])
    asking.service_of(None, False, question["kept_free"])
    priced = joined.with_chip(asking.with_numbers(joined.chip, prices, {})).joined_chip
    asked = meshsearch.MeshQuestion(**{**vars(request), "chips": (priced,)}, **question)
    meshsearch.check_meshes(asked)
    return asked
