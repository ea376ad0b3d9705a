"""Search for the best device mesh of a step, and scaling over chips; each candidate is traced."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rooftrace._progress import tell, telling
from rooftrace.costmodels.estimates import Estimate, estimate
from rooftrace.errors import RequestError
from rooftrace.hardware.systems import System
from rooftrace.hardware.units import format_time
from rooftrace.reporting.commands import questions
from rooftrace.reporting.commands.requests import StepRequest
from rooftrace.reporting.commands.sweeps import level_values
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
    """A question over meshes: of one phase, on one system.  Its mesh names the axes."""

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


def check_meshes(question: MeshQuestion) -> None:
    """Raise RequestError for a question that has no answer."""
    if not question.job.is_named:
        raise RequestError(
            f"{question.job.name}: each mesh is traced anew, from a target: give a config, or "
            "file.py:build that takes the mesh"
        )
    if question.limits.ttft is not None:
        raise RequestError("ttft: it is for requests, and a mesh prices one step")
    if question.limits.tpot is not None and question.phase != "decode":
        raise RequestError(f"tpot: it is for decode, and this is {question.phase}; use step")
    if question.find == "scaling" and (str(question.limits) or len(question.batches) > 1):
        limits = str(question.limits) or ", ".join(map(str, question.batches))
        raise RequestError(f"scaling has no limits and one batch: leave out {limits}")


def search(question: MeshQuestion) -> MeshAnswer:
    """The mesh with most items per chip of those that fit and hold the limits.

    Where a step fits only with activation checkpointing, it has that (checkpoint "full"), unless
    the request names a checkpoint.
    """
    rows, left_out = list[MeshRow](), list[str]()
    most = {"tp": question.system.per_node, "ep": question.system.per_node}
    axes = tuple(question.job.request.mesh) or USUAL_AXES
    for count, batch in itertools.product(question.counts, question.batches):
        for mesh in meshes_of(count, axes, most):
            rows += _tried(question, mesh, batch, left_out)
    if not rows:
        raise RequestError(f"no mesh can be traced: {left_out[0] if left_out else 'none divides'}")
    within = [row for row in rows if row.fits and _holds(question, row)]
    outside = [row for row in rows if not (row.fits and _holds(question, row))]
    return MeshAnswer(
        title=f"{question.job.name}, {question.phase}",
        question=_words(question),
        item=rows[0].item,
        system=question.system.name,
        rows=tuple(sorted(within, key=lambda row: (-row.items_per_s_per_chip, row.chips))),
        others=tuple(sorted(outside, key=lambda row: row.peak / row.capacity)),
        left_out=tuple(dict.fromkeys(left_out)),
        rests=tuple(_grounds(question, rows)),
    )


def scaled(question: MeshQuestion) -> ScalingAnswer:
    """The step on each number of chips: replicas are added along the first axis of the mesh.

    Raises RequestError where no count is a multiple of the other axes.
    """
    axes = dict(question.job.request.mesh) or {USUAL_AXES[0]: 1}
    first = next((axis for axis in axes if axis != "pp"), next(iter(axes)))
    inner = math.prod(size for axis, size in axes.items() if axis != first)
    rows, left_out = list[MeshRow](), list[str]()
    for count in question.counts:
        if count % inner == 0:
            mesh = {**axes, first: count // inner}
            rows += _tried(question, mesh, question.batches[0], left_out)
    if not rows:
        reason = left_out[0] if left_out else f"expected multiples of {inner} ({mesh_words(axes)})"
        raise RequestError(f"chips {', '.join(map(str, question.counts))}: {reason}")
    return ScalingAnswer(
        title=f"{question.job.name}, {question.phase}",
        item=rows[0].item,
        system=question.system.name,
        rows=tuple(rows),
        left_out=tuple(dict.fromkeys(left_out)),
        rests=tuple(_grounds(question, rows)),
    )


def _tried(
    question: MeshQuestion, mesh: Mapping[str, int], batch: int | None, left_out: list[str]
) -> Iterator[MeshRow]:
    """The rows of a mesh: without, and where that does not fit with activation checkpointing."""
    from rooftrace.tracer import TraceError

    checkpoints: tuple[str, ...] = (question.job.request.checkpoint,)
    if "checkpoint" not in question.job.explicit and question.find == "mesh":
        checkpoints = ("none", "full") if phase_of(question.phase).trains else ("none",)
    for checkpoint in checkpoints:
        tell(f"{mesh_words(mesh)}{'' if checkpoint == 'none' else f', checkpoint {checkpoint}'}")
        try:
            estimates = _estimates(question, mesh, batch, checkpoint)
        except (RequestError, TraceError) as error:
            left_out.append(f"{mesh_words(mesh)}: {str(error).splitlines()[0]}")
            return
        row = row_of(estimates, mesh, checkpoint, question.kept_free)
        yield row
        if row.fits:
            return


def _estimates(
    question: MeshQuestion, mesh: Mapping[str, int], batch: int | None, checkpoint: str
) -> dict[str, Estimate]:
    request = question.job.request
    piped = mesh.get("pp", 1) > 1
    request = replace(
        request,
        mesh=dict(mesh),
        checkpoint=checkpoint,
        batch=request.batch if batch is None else batch,
        schedule=request.schedule if piped else None,
        microbatches=request.microbatches if piped else None,
    )
    job = replace(question.job, request=request, phases=(question.phase,), explicit=())
    plan, chip = question.conditions[0].plan, question.chip
    graphs = SizedSource(job, ()).graphs(())
    return {phase: estimate(plan(graph), chip) for phase, graph in graphs.items()}


def _holds(question: MeshQuestion, row: MeshRow) -> bool:
    limits = question.limits.step, question.limits.tpot
    return all(row.seconds <= limit for limit in limits if limit is not None)


def _words(question: MeshQuestion) -> str:
    counts = ", ".join(f"{count:,}" for count in question.counts)
    limit = question.limits.tpot if question.limits.step is None else question.limits.step
    within = "" if limit is None else f", a step of at most {format_time(limit)}"
    return f"the mesh with most items per chip on {counts} chips of {question.system.name}{within}"


def _grounds(question: MeshQuestion, rows: Sequence[MeshRow]) -> Iterator[str]:
    yield f"execution {question.model.name}"
    yield "every mesh is a trace of its own, of one process; all others do the same work"
    if question.find == "scaling":
        yield (
            "strong: all chips do together what the most of them do in one step; gradients add up "
            "over microbatches, each of which exchanges what one does"
        )
    beyond = dict.fromkeys(row.beyond for row in rows if row.beyond)
    yield from (f"outside of measurements: {text}" for text in beyond)


# -- calls -----------------------------------------------------------------------------------------


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
    """The mesh of so many chips with most items per second of a chip, of those that fit.

    target: a config, or code that builds a module over a mesh; each candidate is a trace of its
    own, kept on disk.  chips: one number or several.  mesh: names the axes whose sizes are looked
    for (default dp and tp; tp stays within a node); schedule and microbatches go with pp.  over:
    batches of a replica to try.  step, tpot: limits in seconds, or as "30 ms", of a step and of a
    decode step.  checkpoint: default "full" where a step does not fit without.  price: dollar/hour
    of one chip.  kept_free: share of the memory.  Other arguments are those of `trace`.

    Raises RequestError where no mesh can be traced.  Where none fits and holds the limits, the
    answer has no `best`, and says what is nearest and how many chips are needed.
    """
    batches = (None,) if over is None else tuple(level_values(*questions.over_of(over, "batch")))
    question = _mesh_question(
        best_mesh, target, kwargs, price, find="mesh", kept_free=kept_free, batches=batches,
        counts=questions.counts_of(chips), limits=questions.limits_of(step, tpot, None),
    )  # fmt: skip
    with telling(progress):
        return search(question)


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
    counts = USUAL_COUNTS if chips is None else questions.counts_of(chips)
    question = _mesh_question(
        scaling, target, kwargs, price, find="scaling", kept_free=kept_free, counts=counts
    )
    with telling(progress):
        return scaled(question)


def _mesh_question(
    function: Callable[..., Any], target: Any, named: Mapping[str, Any], price: float | None,
    **about: Any,
) -> MeshQuestion:  # fmt: skip
    find = about["find"]
    if named.get("system") is None:
        raise RequestError(f"--find {find}: name how chips are joined, as --system dgx-h100")
    if named.get("chip") is not None:
        raise RequestError(f"--chip with --find {find}: it has no use for it; name a --system")
    phases = {} if {"phase", "phases"} & named.keys() else {"phase": "training"}
    request = StepRequest.of(function, target, (), {**phases, **named})
    joined = request.chip.system
    assert joined is not None  # the chip is that of a system
    prices = questions.numbers_of("price", price, [joined.chip])
    questions.service_of(None, False, about["kept_free"])
    priced = joined.with_chip(questions.with_numbers(joined.chip, prices, {})).joined_chip
    question = MeshQuestion(**{**vars(request), "chips": (priced,)}, **about)
    check_meshes(question)
    return question
