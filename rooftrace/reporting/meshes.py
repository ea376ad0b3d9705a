"""Questions about meshes, as calls: the best one of some chips, and how a step scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rooftrace._progress import telling
from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.meshing import MeshAnswer, ScalingAnswer
from rooftrace.costmodels.planning import usual_execution
from rooftrace.errors import RequestError
from rooftrace.hardware.systems import System, load_system
from rooftrace.reporting import meshsearch, questions as asking
from rooftrace.reporting.alternatives import each_condition
from rooftrace.reporting.stepforms import level_values
from rooftrace.tracer.asking import Job


def best_mesh(
    target: Any,
    *,
    chips: int | Sequence[int],
    system: str | System,
    phase: str = "training",
    over: Any = None,
    step: float | str | None = None,
    tpot: float | str | None = None,
    execution: str | ExecutionModel | None = None,
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
        Job.of(best_mesh, target, (), kwargs, phase=phase), "mesh", system, execution, price,
        kwargs, counts=asking.counts_of(chips), batches=batches,
        limits=asking.limits_of(step, tpot, None), kept_free=kept_free,
    )  # fmt: skip
    with telling(progress):
        return meshsearch.search(asked)


def scaling(
    target: Any,
    *,
    system: str | System,
    chips: int | Sequence[int] | None = None,
    phase: str = "training",
    execution: str | ExecutionModel | None = None,
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
        Job.of(scaling, target, (), kwargs, phase=phase), "scaling", system, execution, price,
        kwargs, counts=counts, kept_free=kept_free,
    )  # fmt: skip
    with telling(progress):
        return meshsearch.scaled(asked)


def _question(
    job: Job, find: str, system: str | System, execution: Any, price: float | None, named: Any,
    **own: Any,
) -> meshsearch.MeshQuestion:  # fmt: skip
    joined = load_system(system)
    prices = asking.own_numbers("price", price, [joined.chip])
    asking.service_of(None, False, own["kept_free"])
    serves = job.phases is not None and job.phases[0] in ("prefill", "decode")
    usual = "serving" if serves else usual_execution(job)
    precisions = job.precisions
    for name, value in named.items():
        if name in precisions._fields and not isinstance(value, (str, type(None))):
            raise RequestError(f"{name} {', '.join(map(str, value))}: a mesh is priced in one")
    conditions = each_condition(usual if execution is None else execution, *precisions)
    if len(conditions) > 1:
        names = ", ".join(each.execution.name for each in conditions)
        raise RequestError(f"execution {names}: a mesh is priced under one")
    asked = meshsearch.MeshQuestion(
        job=job,
        find=find,
        system=joined.with_chip(asking.with_numbers(joined.chip, prices, {})),
        conditions=conditions[0],
        **own,
    )
    meshsearch.check_meshes(asked)
    return asked
