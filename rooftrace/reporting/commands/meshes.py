"""Search for the best device mesh of a step, and scaling over chips; each candidate is traced."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rooftrace._progress import tell, telling
from rooftrace.costmodels.estimates import Estimate, estimate
from rooftrace.errors import RequestError
from rooftrace.hardware.systems import System
from rooftrace.hardware.units import format_time
from rooftrace.reporting.commands import questions as asking
from rooftrace.reporting.commands.calls import StepRequest
from rooftrace.reporting.commands.stepforms import level_values
from rooftrace.studies.solving import (
    MeshAnswer,
    MeshRow,
    ScalingAnswer,
    mesh_words,
    meshes_of,
    row_of,
)
from rooftrace.studies.solving.workloads import Limits
from rooftrace.tracer.names import phase_of
from rooftrace.tracer.phases import SizedSource

USUAL_AXES = ("dp", "tp")
USUAL_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, kw_only=True)
class MeshQuestion(StepRequest):
    """What is looked for over meshes: of one phase, on one system.  Its mesh names the axes."""

    find: str
    counts: Sequence[int]  # of chips
    batches: Sequence[int | None] = (None,)  # of a replica; None: as it is
    limits: Limits = field(default_factory=Limits)
    kept_free: float = 0.0

    @property
    def system(self) -> System:
        """The system whose chips are joined."""
        system: System = self.chip.system
        return system

    @property
    def phase(self) -> str:
        """The phase that is priced."""
        return self.job.phases[0] if self.job.phases else "training"


def check_meshes(asked: MeshQuestion) -> None:
    """Raise RequestError for a question that has no answer."""
    if not asked.job.is_named:
        raise RequestError(
            f"{asked.job.name}: each mesh is traced anew, from a target: give a config, or "
            "file.py:build that takes the mesh"
        )
    if asked.limits.ttft is not None:
        raise RequestError("ttft: it is for requests, and a mesh prices one step")
    if asked.limits.tpot is not None and asked.phase != "decode":
        raise RequestError(f"tpot: it is for decode, and this is {asked.phase}; use step")
    if asked.find == "scaling" and (str(asked.limits) or len(asked.batches) > 1):
        limits = str(asked.limits) or ", ".join(map(str, asked.batches))
        raise RequestError(f"scaling has no limits and one batch: leave out {limits}")


def search(asked: MeshQuestion) -> MeshAnswer:
    """The mesh with most items per chip of those that fit and hold the limits.

    Where activations fit only if they are made again, they are (checkpoint "full"), unless that
    was asked for.
    """
    rows, left_out = list[MeshRow](), list[str]()
    most = {"tp": asked.system.per_node, "ep": asked.system.per_node}
    axes = tuple(asked.job.request.mesh) or USUAL_AXES
    for count, batch in itertools.product(asked.counts, asked.batches):
        for mesh in meshes_of(count, axes, most):
            rows += _tried(asked, mesh, batch, left_out)
    if not rows:
        raise RequestError(f"no mesh can be traced: {left_out[0] if left_out else 'none divides'}")
    within = [row for row in rows if row.fits and _holds(asked, row)]
    outside = [row for row in rows if not (row.fits and _holds(asked, row))]
    return MeshAnswer(
        title=f"{asked.job.name}, {asked.phase}",
        question=_question(asked),
        item=rows[0].item,
        system=asked.system.name,
        rows=tuple(sorted(within, key=lambda row: (-row.items_per_s_per_chip, row.chips))),
        others=tuple(sorted(outside, key=lambda row: row.peak / row.capacity)),
        left_out=tuple(dict.fromkeys(left_out)),
        rests=tuple(_grounds(asked, rows)),
    )


def scaled(asked: MeshQuestion) -> ScalingAnswer:
    """The step on each number of chips: replicas are added along the first axis of the mesh.

    Raises RequestError where no count is a multiple of the other axes.
    """
    own = dict(asked.job.request.mesh) or {USUAL_AXES[0]: 1}
    first = next((axis for axis in own if axis != "pp"), next(iter(own)))
    inner = 1
    for axis, size in own.items():
        inner *= 1 if axis == first else size
    rows, left_out = list[MeshRow](), list[str]()
    for count in asked.counts:
        if count % inner == 0:
            mesh = {**own, first: count // inner}
            rows += _tried(asked, mesh, asked.batches[0], left_out)
    if not rows:
        reason = left_out[0] if left_out else f"expected multiples of {inner} ({mesh_words(own)})"
        raise RequestError(f"chips {', '.join(map(str, asked.counts))}: {reason}")
    return ScalingAnswer(
        title=f"{asked.job.name}, {asked.phase}",
        item=rows[0].item,
        system=asked.system.name,
        rows=tuple(rows),
        left_out=tuple(dict.fromkeys(left_out)),
        rests=tuple(_grounds(asked, rows)),
    )


def _tried(
    asked: MeshQuestion, mesh: Mapping[str, int], batch: int | None, left_out: list[str]
) -> Iterator[MeshRow]:
    """The rows of a mesh: as it is, and with activations made again where it does not fit."""
    chosen = asked.job.request.checkpoint
    ways: tuple[str, ...] = (chosen,)
    if "checkpoint" not in asked.job.explicit and asked.find == "mesh":
        ways = ("none", "full") if phase_of(asked.phase).trains else ("none",)
    from rooftrace.tracer import TraceError

    for checkpoint in ways:
        tell(f"{mesh_words(mesh)}{'' if checkpoint == 'none' else f', checkpoint {checkpoint}'}")
        try:
            estimates = _estimates(asked, mesh, batch, checkpoint)
        except (RequestError, TraceError) as error:
            left_out.append(f"{mesh_words(mesh)}: {str(error).splitlines()[0]}")
            return
        row = row_of(estimates, mesh, checkpoint, asked.kept_free)
        yield row
        if row.fits:
            return


def _estimates(
    asked: MeshQuestion, mesh: Mapping[str, int], batch: int | None, checkpoint: str
) -> dict[str, Estimate]:
    own = asked.job.request
    piped = mesh.get("pp", 1) > 1
    request = replace(
        own,
        mesh=dict(mesh),
        checkpoint=checkpoint,
        batch=own.batch if batch is None else batch,
        schedule=own.schedule if piped else None,
        microbatches=own.microbatches if piped else None,
    )
    job = replace(asked.job, request=request, phases=(asked.phase,), explicit=())
    graphs = SizedSource(job, ()).graphs(())
    conditions = asked.conditions[0]
    return {phase: estimate(conditions.plan(graph), asked.chip) for phase, graph in graphs.items()}


def _holds(asked: MeshQuestion, row: MeshRow) -> bool:
    limits = [limit for limit in (asked.limits.step, asked.limits.tpot) if limit is not None]
    return all(row.seconds <= limit for limit in limits)


def _question(asked: MeshQuestion) -> str:
    counts = ", ".join(f"{count:,}" for count in asked.counts)
    limit = asked.limits.tpot if asked.limits.step is None else asked.limits.step
    within = "" if limit is None else f", a step of at most {format_time(limit)}"
    return f"the mesh with most items per chip on {counts} chips of {asked.system.name}{within}"


def _grounds(asked: MeshQuestion, rows: Sequence[MeshRow]) -> Iterator[str]:
    yield f"execution {asked.model.name}"
    yield "every mesh is a trace of its own, of one process; all others do the same work"
    if asked.find == "scaling":
        yield (
            "strong: all chips do together what the most of them do in one step; gradients add up "
            "over microbatches, each of which exchanges what one does"
        )
    beyond = dict.fromkeys(row.beyond for row in rows if row.beyond)
    yield from (f"outside of measurements: {text}" for text in beyond)


# -- meshes ----------------------------------------------------------------------------------------
# Questions about meshes, as calls: the best one of some chips, and how a step scales.


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
    asked = _mesh_question(
        best_mesh, target, kwargs, price, find="mesh", kept_free=kept_free,
        counts=asking.counts_of(chips), batches=batches, limits=asking.limits_of(step, tpot, None),
    )  # fmt: skip
    with telling(progress):
        return search(asked)


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
    counts = USUAL_COUNTS if chips is None else asking.counts_of(chips)
    asked = _mesh_question(
        scaling, target, kwargs, price, find="scaling", kept_free=kept_free,
        counts=counts,
    )  # fmt: skip
    with telling(progress):
        return scaled(asked)


def _mesh_question(
    function: Callable[..., Any], target: Any, named: Mapping[str, Any], price: float | None,
    **question: Any,
) -> MeshQuestion:  # fmt: skip
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
    asked = MeshQuestion(**{**vars(request), "chips": (priced,)}, **question)
    check_meshes(asked)
    return asked
