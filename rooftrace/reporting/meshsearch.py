"""Which mesh is best for a step, and how the step scales: every candidate is a trace of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rooftrace._progress import tell
from rooftrace.costmodels.answers.workloads import Limits
from rooftrace.costmodels.estimating import Estimate, estimate
from rooftrace.costmodels.meshing import (
    MeshAnswer,
    MeshRow,
    ScalingAnswer,
    mesh_words,
    meshes_of,
    row_of,
)
from rooftrace.errors import RequestError
from rooftrace.hardware.systems import System
from rooftrace.hardware.units import format_time
from rooftrace.reporting.requests import StepRequest
from rooftrace.tracer.asking.names import phase_of
from rooftrace.tracer.sizing import SizedSource

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
    from rooftrace.tracer.source import TraceError

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
