"""The best device mesh of a step, scaling over chips, and whole trainings; each mesh is traced."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from rooftrace._progress import tell, telling
from rooftrace.costmodels.estimates import Estimate, estimate
from rooftrace.errors import RequestError
from rooftrace.graph import OpGraph, replicas_of
from rooftrace.hardware import units
from rooftrace.hardware.chip import Fact
from rooftrace.hardware.systems import System
from rooftrace.hardware.units import format_capacity, format_time
from rooftrace.reporting.commands import questions
from rooftrace.reporting.commands.arguments import MeshArguments, TrainingArguments
from rooftrace.reporting.commands.options import taken
from rooftrace.reporting.commands.requests import StepRequest
from rooftrace.reporting.commands.sweeps import level_values
from rooftrace.studies.solving import (
    MeshAnswer,
    MeshRow,
    ScalingAnswer,
    TrainingRun,
    mesh_words,
    meshes_of,
    row_of,
    with_experts,
)
from rooftrace.studies.solving.workloads import Limits
from rooftrace.tracer.names import PLANS, ZERO, is_shared, phase_of
from rooftrace.tracer.phases import SizedSource

USUAL_AXES = ("dp", "tp")
USUAL_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, kw_only=True)
class MeshQuestion(StepRequest):
    """A question over meshes: of one phase, on one system.  Its mesh names the axes."""

    find: str
    counts: Sequence[int]  # of chips
    work: Sequence[int | None] = (None,)  # global batches; None: each replica has its batch
    limits: Limits = field(default_factory=Limits)
    kept_free: float = 0.0
    fixed: bool = False  # whether the mesh is the one that is asked for

    @property
    def system(self) -> System:
        """The system whose chips are joined."""
        system: System = self.chip.system
        return system

    @property
    def phase(self) -> str:
        """The phase that is priced."""
        return self.job.phases[0] if self.job.phases else "training"

    @property
    def trains(self) -> bool:
        """Whether replicas exchange gradients."""
        return phase_of(self.phase).trains

    @property
    def noun(self) -> str:
        """The plural of the item that global batches are numbers of."""
        return "requests" if self.phase in ("prefill", "decode") else "samples"


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
    if question.find == "run" and not question.trains:
        raise RequestError(f"phase {question.phase} with --find run: expected training")
    if question.find == "scaling" and str(question.limits):
        raise RequestError(f"scaling has no limits: leave out {question.limits}")
    batch, microbatches = question.job.request.batch, question.job.request.microbatches
    if question.find == "mesh" and not question.trains and batch is not None:
        raise RequestError(
            f"--batch {batch} with --find mesh: replicas share the {question.noun}; say how many "
            f"all chips have in a step, as --global-batch {batch}"
        )
    if question.find != "scaling" and microbatches is not None:
        raise RequestError(
            f"--microbatches {microbatches} with --find {question.find}: they follow from "
            "--global-batch and --batch; leave it out"
        )


def search(question: MeshQuestion) -> MeshAnswer:
    """The mesh with most items per chip of those that fit and hold the limits.

    All have the same global batch.  Where a step of training does not fit, it has smaller
    microbatches, then activation checkpointing (checkpoint "full"), unless the request names them.
    """
    rows, left_out, kept = list[MeshRow](), list[str](), _Graphs()
    for count, work in itertools.product(question.counts, question.work):
        for mesh in _meshes(question, count):
            rows += _tried(question, mesh, work, left_out, kept)
    if not rows:
        raise RequestError(f"no mesh can be traced: {left_out[0] if left_out else 'none divides'}")
    rows = _merged(question, rows)
    within = [row for row in rows if row.fits and _holds(question, row)]
    outside = [row for row in rows if not (row.fits and _holds(question, row))]
    within.sort(key=lambda row: (-row.items_per_s_per_chip, row.chips))
    best = within[0] if within else None
    return MeshAnswer(
        title=f"{question.job.name}, {question.phase}",
        question=_words(question),
        item=rows[0].item,
        system=question.system.name,
        rows=tuple(within),
        others=tuple(sorted(outside, key=lambda row: row.peak / row.capacity)),
        left_out=tuple(dict.fromkeys(left_out)),
        edges=tuple(_edges(question, best)) if best else (),
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
            rows += _tried(question, mesh, None, left_out, _Graphs())
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


_Graphs: TypeAlias = dict[Hashable, Mapping[str, OpGraph]]
"""Graphs that serve several meshes, by what they are traced with."""


def _meshes(question: MeshQuestion, count: int) -> Iterator[dict[str, int]]:
    """The meshes of so many chips; experts of a config are a view of other axes."""
    if question.fixed:
        yield dict(question.job.request.mesh)
        return
    axes = tuple(question.job.request.mesh) or USUAL_AXES
    node = question.system.per_node
    viewed = "ep" in axes and not question.job.is_code
    dense = tuple(axis for axis in axes if not (viewed and axis == "ep")) or USUAL_AXES[:1]
    for mesh in meshes_of(count, dense, {"tp": node, "ep": node}):
        yield from with_experts(mesh, node) if viewed else (mesh,)


def _tried(
    question: MeshQuestion,
    mesh: Mapping[str, int],
    work: int | None,
    left_out: list[str],
    kept: _Graphs,
) -> Iterator[MeshRow]:
    """The rows of a mesh: as asked for, and of training what takes less until it fits."""
    from rooftrace.errors import TraceError

    asked, request = question.find != "scaling" and question.trains, question.job.request
    checkpoints: tuple[str, ...] = (request.checkpoint,)
    if asked and "checkpoint" not in question.job.explicit:
        checkpoints = ("none", "full")
    replicas, part = replicas_of(mesh) or 1, None
    if work is not None:
        part, rest = divmod(work, replicas)
        if rest:
            left_out.append(
                f"{mesh_words(mesh)}: {work} {question.noun} cannot be spread evenly over "
                f"{replicas} replicas"
            )
            return
    named = request.batch if question.trains or part is None else None
    first = (1 if mesh.get("pp", 1) > 1 else part) if named is None else named
    if part and part % (first or 1):
        left_out.append(f"{mesh_words(mesh)}: {part} samples of a replica in batches of {first}")
        return
    for checkpoint in checkpoints:
        batch: int | None = first
        while batch != 0:
            said = "" if checkpoint == "none" else f", checkpoint {checkpoint}"
            tell(f"{mesh_words(mesh)}{said}{f', batch {batch}' if part and batch else ''}")
            times = 1 if part is None or batch is None else part // batch
            try:
                estimates = _estimates(question, mesh, batch, times, checkpoint, kept)
                row = row_of(estimates, mesh, checkpoint, question.kept_free, times)
            except (RequestError, TraceError) as error:
                left_out.append(f"{mesh_words(mesh)}: {str(error).splitlines()[0]}")
                return
            yield row
            if row.fits or row.fixed > row.capacity:
                return
            batch = _smaller(row, part) if asked and named is None and part and batch else 0


def _smaller(row: MeshRow, part: int) -> int:
    """The largest batch that divides the part of a replica and should fit; 0: none does."""
    room = (row.capacity - row.fixed) / max(row.peak - row.fixed, 1) * row.batch
    return max((n for n in range(1, row.batch) if part % n == 0 and n <= room), default=0)


def _estimates(
    question: MeshQuestion,
    mesh: Mapping[str, int],
    batch: int | None,
    microbatches: int,
    checkpoint: str,
    kept: _Graphs,
) -> dict[str, Estimate]:
    request = question.job.request
    piped = mesh.get("pp", 1) > 1
    alone = _alone(question, mesh)
    traced = {axis: n for axis, n in mesh.items() if not (alone and replicas_of({axis: 2}) == 2)}
    request = replace(
        request,
        mesh=traced or {"dp": 1},
        checkpoint=checkpoint,
        batch=request.batch if batch is None else batch,
        plan=request.plan if mesh.get("tp", 1) > 1 else PLANS[0],
        zero=request.zero if is_shared(mesh) else ZERO[-1],
        schedule=request.schedule if piped else None,
        interleave=request.interleave if piped else None,
        microbatches=(request.microbatches or microbatches) if piped else None,
    )
    job = replace(question.job, request=request, phases=(question.phase,), explicit=())
    key = (tuple(request.mesh.items()), request.batch, request.microbatches, checkpoint)
    if key not in kept:
        kept[key] = SizedSource(job, ()).graphs(())
    graphs = kept[key]
    if alone:
        graphs = {phase: graph.replace(mesh=dict(mesh)) for phase, graph in graphs.items()}
    plan, chip = question.conditions[0].plan, question.chip
    return {phase: estimate(plan(graph), chip) for phase, graph in graphs.items()}


def _alone(question: MeshQuestion, mesh: Mapping[str, int]) -> bool:
    """Whether replicas exchange nothing, so that one of them tells of all: they do not train, and
    have all experts."""
    return not (question.job.is_code or question.trains or mesh.get("ep", 1) > 1)


def _merged(question: MeshQuestion, rows: Sequence[MeshRow]) -> list[MeshRow]:
    """Rows without those that are so many copies of another."""
    first: dict[Hashable, MeshRow] = {}
    for row in sorted(rows, key=lambda row: row.chips):
        key: Hashable = id(row)
        if _alone(question, row.mesh):
            inner = frozenset((a, n) for a, n in row.mesh.items() if replicas_of({a: 2}) == 1)
            key = (inner, row.batch)
        seen = first.setdefault(key, row)
        if seen is not row:
            first[key] = replace(seen, copies=(*seen.copies, row.chips))
    return list(first.values())


def _edges(question: MeshQuestion, best: MeshRow) -> Iterator[str]:
    """Where the best stands at the end of what was tried."""
    for name, value, tried in (
        ("global batch", best.global_batch, [work for work in question.work if work is not None]),
        ("chips", best.chips, list(question.counts)),
    ):
        for end, word in ((max(tried, default=0), "most"), (min(tried, default=0), "fewest")):
            if len(set(tried)) > 1 and value == end:
                yield f"{name} {value:,}: it is the {word} that was tried; look beyond"
    width = best.mesh.get("tp", 1)
    if width == question.system.per_node < best.chips:
        yield f"tp={width}: it is a whole node of {question.system.name}; wider was not tried"


def _holds(question: MeshQuestion, row: MeshRow) -> bool:
    limits = question.limits.step, question.limits.tpot
    return all(row.seconds <= limit for limit in limits if limit is not None)


def _words(question: MeshQuestion) -> str:
    counts = ", ".join(f"{count:,}" for count in question.counts)
    limit = question.limits.tpot if question.limits.step is None else question.limits.step
    within = "" if limit is None else f", a step of at most {format_time(limit)}"
    works = ", ".join(f"{work:,}" for work in question.work if work is not None)
    same = f"; each has {works} {question.noun} in a step over all its chips" if works else ""
    chips = f"{counts} chips of {question.system.name}"
    return f"the mesh with most items per chip on {chips}{within}{same}"


def _grounds(question: MeshQuestion, rows: Sequence[MeshRow]) -> Iterator[str]:
    yield f"execution {question.model.name}"
    yield "a mesh is a trace of one process; all others do the same work"
    if question.find == "scaling":
        yield (
            "strong: all chips do together what the most of them do in one step; gradients add up "
            "over microbatches, each of which exchanges what one does"
        )
    elif question.work == (None,):
        yield "the code says what batch a replica has: meshes of other replicas do other work"
    elif question.trains:
        yield "gradients add up over microbatches, each of which exchanges what one does"
    for row in rows:
        if row.copies:
            more = ", ".join(f"{chips:,}" for chips in row.copies)
            yield f"{mesh_words(row.mesh)}, batch {row.batch}: as fast in copies, on {more} chips"
    yield from question.system.origins(max(row.chips for row in rows))
    beyond = dict.fromkeys(text for row in rows for text in row.beyond.split("; ") if row.beyond)
    if beyond:
        yield f"outside of measurements: {'; '.join(beyond)}"


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
    for (default dp and tp; tp stays within a node); schedule goes with pp.  global_batch: requests,
    or samples of training, of one step over all chips, the same for every mesh; each replica takes
    its part.  Default: `batch` for each chip.  over: several of them.  batch: of training, what a
    replica takes at once; default all of its part, or as much as fits, one in a pipeline.
    step, tpot: limits in seconds, or as "30 ms", of a step and of a decode step.  checkpoint:
    default "full" where a step does not fit without.  price: dollar/hour of one chip.  kept_free:
    share of the memory.  Other arguments are those of `trace`.

    Raises RequestError where no mesh can be traced.  Where none fits and holds the limits, the
    answer has no `best`, and says what is nearest and how many chips are needed.
    """
    arguments, kwargs = taken(MeshArguments, kwargs)
    counts, work, batch = questions.counts_of(chips), arguments.global_batch, kwargs.get("batch")
    if over is not None and work is not None:
        raise RequestError(f"global_batch {work}: over has values of it; leave one of them out")
    works: tuple[int | None, ...] = (work or (batch or 1) * max(counts),)
    if over is not None:
        works = tuple(level_values(*questions.over_of(over, "global_batch")))
    question = _mesh_question(
        best_mesh, target, kwargs, {"price": price}, find="mesh", kept_free=kept_free, work=works,
        counts=counts, limits=questions.limits_of(step, tpot, None),
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
        scaling, target, kwargs, {"price": price}, find="scaling", kept_free=kept_free,
        counts=counts,
    )  # fmt: skip
    with telling(progress):
        return scaled(question)


def training_run(
    target: Any,
    *,
    chips: int | None = None,
    price: float | None = None,
    power: float | None = None,
    pue: float | None = None,
    kept_free: float = 0.0,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> TrainingRun:
    """Days, chip-hours, dollars and energy of a training on so many tokens, with interruptions.

    tokens: as 15e12 or "15T" (samples of other models).  mesh: its sizes; or chips: how many, of
    which the best mesh is taken (see `best_mesh`).  price: dollar/hour of one chip.  power: watts
    of one, with its share of the node.  pue: energy of the building over that of its computers.
    mtbf: seconds between interruptions of all chips.  restart: seconds until training goes on.
    storage: byte/s at which all chips write a checkpoint.  save_time: seconds for which one stops
    training.  interval: seconds of training between two.  These may be texts, as "3 h".  Other
    arguments are those of `best_mesh`.

    Raises RequestError where the step does not fit the chips, or the training never ends.
    """
    arguments, kwargs = taken(TrainingArguments, kwargs)
    if arguments.tokens is None:
        raise RequestError("a training needs its length: --tokens 15T")
    tokens = questions.amount_of("tokens", arguments.tokens, "count")
    mesh, fixed = kwargs.get("mesh") or {}, chips is None
    if fixed and not mesh:
        raise RequestError("say on which chips: --mesh dp=64,tp=8, or --chips 512 for the best one")
    (count,) = questions.counts_of(math.prod(mesh.values()) if chips is None else chips)
    meshes, kwargs = taken(MeshArguments, kwargs)
    question = _mesh_question(
        training_run, target, kwargs, {"price": price, "power": power, "pue": pue}, find="run",
        kept_free=kept_free, fixed=fixed, counts=(count,),
        work=(meshes.global_batch or (kwargs.get("batch") or 1) * count,),
    )  # fmt: skip
    with telling(progress):
        answer = search(question)
    if answer.best is None:
        raise RequestError(f"{_unfit(answer)}; rooftrace solve --find mesh says what does")
    return _training(question, answer, answer.best, tokens, arguments)


def _unfit(answer: MeshAnswer) -> str:
    nearest = answer.others[0]
    has = f"it holds {format_capacity(nearest.capacity)}"
    return f"{mesh_words(nearest.mesh)}: {format_capacity(nearest.peak)} of each chip; {has}"


def _training(
    question: MeshQuestion, answer: MeshAnswer, row: MeshRow, tokens: float,
    arguments: TrainingArguments,
) -> TrainingRun:  # fmt: skip
    told = {n: getattr(arguments, n) for n in ("mtbf", "save_time", "interval")}
    facts = {}
    for name, unit, share in (("restart", "second", 1), ("storage", "byte/s", row.chips)):
        if (value := getattr(arguments, name)) is not None:
            amount = questions.amount_of(name, value, unit) / share
            facts[name] = Fact(amount, units.write(amount, unit), "as asked for", "measured")
    run = TrainingRun(
        title=answer.title, system=answer.system, tokens=tokens, row=row,
        price=question.chip.price, power=question.chip.drawn,
        asked={n.removesuffix("_time"): questions.amount_of(n, v)
               for n, v in told.items() if v is not None},
        rests=answer.rests, **facts,
    )  # fmt: skip
    if not run.goodput:
        raise RequestError(
            f"this training never ends: an interruption each {format_time(run.mtbf)}, a checkpoint "
            f"of {format_time(run.save)} each {format_time(run.interval)}"
        )
    return replace(run, rests=(*_of_training(question, run), *answer.rests))


def _of_training(question: MeshQuestion, run: TrainingRun) -> Iterator[str]:
    """The facts of a training, with their sources."""
    chip = question.chip
    if "mtbf" not in run.asked:
        words = f"{run.chip_mtbf.text} of one chip ({run.chip_mtbf.source}); --mtbf"
        other = "" if chip.name == "h100-sxm" else f", taken for {chip.name} too"
        yield f"time between interruptions: {words}{other}"
    yield f"restart: {run.restart.text} ({run.restart.source}); --restart"
    if "save" not in run.asked:
        who = "each process writes what it has" if question.job.is_code else "each part once"
        yield (
            f"checkpoint: weights and states of the optimizer, {who}; training waits for it, at "
            f"{run.storage.text} of a chip ({run.storage.source}); --storage, --save-time"
        )
    if "interval" not in run.asked:
        yield "interval of checkpoints: sqrt(2 x save x mtbf), the optimum of Young; --interval"
    if run.price is not None:
        yield f"price of {chip.name}: {run.price.text} ({run.price.source})"
    yield questions.power_words(chip) or f"energy: no power of {chip.name} is known; --power"


def _mesh_question(
    function: Callable[..., Any], target: Any, named: Mapping[str, Any], costs: Mapping[str, Any],
    **about: Any,
) -> MeshQuestion:  # fmt: skip
    """costs: price, power, pue, as `questions.with_costs` takes them."""
    find = about["find"]
    if named.get("system") is None:
        raise RequestError(f"--find {find}: name how chips are joined, as --system dgx-h100")
    if named.get("chip") is not None:
        raise RequestError(f"--chip with --find {find}: it has no use for it; name a --system")
    phases = {} if {"phase", "phases"} & named.keys() else {"phase": "training"}
    request = StepRequest.of(function, target, (), {**phases, **named})
    joined = request.chip.system
    assert joined is not None  # the chip is that of a system
    questions.service_of(None, False, about["kept_free"])
    (priced,) = questions.with_costs([joined.joined_chip], **costs)
    if request.job.is_code:
        about["work"] = (None,)
    question = MeshQuestion(**{**vars(request), "chips": (priced,)}, **about)
    check_meshes(question)
    return question
