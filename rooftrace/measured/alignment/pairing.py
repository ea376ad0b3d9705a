"""Reads measurements, makes the graphs of their steps, and finds the graph that fits a trace."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rooftrace.costmodels.estimates import Estimate, estimate
from rooftrace.costmodels.fusion import ExecutionModel, execution_model
from rooftrace.costmodels.rewrites import reprice
from rooftrace.errors import ProfileError, RequestError, TargetError, UnusedError
from rooftrace.graph import OpGraph
from rooftrace.hardware import Chip, units
from rooftrace.measured.alignment.aligning import align
from rooftrace.measured.alignment.alignment import Alignment
from rooftrace.measured.alignment.compiled_steps import FusedStep, fused
from rooftrace.measured.bench import ModelRow, Run
from rooftrace.measured.profiles import Measured, StepTime, Trace, records_of, source_of
from rooftrace.tracer import names


@dataclass(frozen=True, slots=True)
class Match:
    """A trace matched with its best graph."""

    estimate: Estimate  # of that graph
    alignment: Alignment
    phases: tuple[str, ...]  # of all graphs that were tried


def best_match(
    trace: Trace,
    graphs_of: Callable[[], Graphs] | None,
    chip: Chip,
    model: ExecutionModel,
    tell: Callable[[str], None],
) -> Match:
    """The graph that a trace matches best, priced, with the alignment.

    graphs_of: makes the graphs by phase of the code that ran.  Raises RequestError without
    it, and ProfileError where the trace matches no graph.
    """
    graphs = graphs_of_trace(trace, graphs_of)
    best: Match | None = None
    errors: list[ProfileError] = []
    for phase, graph in graphs.items():
        tell(f"aligning with {phase}")
        priced = estimate(graph, chip, model.as_called)
        try:
            alignment = align(trace, priced.graph)
        except ProfileError as error:
            errors.append(error)
            continue
        if best is None or alignment.score > best.alignment.score:
            best = Match(priced, alignment, tuple(graphs))
    if best is not None:
        return best
    if len(errors) == 1:
        raise errors[0]
    raise ProfileError(f"{errors[0]} (tried {units.listed(list(graphs))}; this is of the first)")


def best_fused(
    trace: Trace, graphs_of: Callable[[], Graphs] | None, tell: Callable[[str], None]
) -> tuple[FusedStep, tuple[str, ...]]:
    """The compiled step of the graph that a trace matches best, and the phases that were tried.

    Raises RequestError without graphs, and ProfileError where no kernel has an op of one.
    """
    graphs = graphs_of_trace(trace, graphs_of)
    steps: list[FusedStep] = []
    refused: list[ProfileError] = []
    for phase, graph in graphs.items():
        tell(f"aligning with {phase}")
        try:
            steps.append(fused(trace, graph))
        except ProfileError as error:
            refused.append(error)
    if not steps:
        raise refused[0]
    return max(steps, key=lambda step: step.coverage), tuple(graphs)


def graphs_of_trace(trace: Trace, graphs_of: Callable[[], Graphs] | None) -> Graphs:
    """The graphs by phase of the code that ran; RequestError without any."""
    if graphs_of is None:
        raise RequestError(
            f"{trace.source or 'the trace'}: a trace does not say what ran: name it with "
            "--target, and its sizes with --batch, --seq, --phase (in Python: "
            "target=rooftrace.trace(model, x)); `rooftrace diff TRACE` needs neither to say where "
            "its time goes"
        )
    graphs = graphs_of()
    if not graphs:
        raise RequestError(f"{trace.source}: the target has no graph to set it beside")
    return graphs


# -- reading ---------------------------------------------------------------------------------------

Graphs = Mapping[str, OpGraph]
"""By phase."""


def read_measured(path: str, use: str) -> Measured:
    """The measurements in a file; its contents tell the kind.

    use: the purpose, in words, for the error.  Raises the errors of the file's reader, and
    RequestError for counted bytes, which only complement measurements.
    """
    kind = source_of(path)
    place = kind.place(path)
    if place:
        raise RequestError(f"{path}: {kind.about}, which is not enough for {use}: {place}")
    return records_of(kind, path)


# -- steps -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """One measured step, and how its graph is made."""

    label: str  # for reports
    place: str  # the key of a row, or the line of a table
    group: str  # the model or target, whatever its sizes
    seconds: float  # s
    graph: Callable[[], OpGraph]
    phase: str | None = None  # None: unknown, in a table
    row: ModelRow | None = None  # of a run
    batch: int | None = None  # in a table
    # The graph at another batch and in another phase; None: it cannot be made.
    at: Callable[[int | None, str | None], OpGraph] | None = None

    @staticmethod
    def of_graph(graph: OpGraph) -> MeasuredStep:
        """A step of this graph, of unknown time."""
        name = str(graph.model.get("name") or "model")
        return MeasuredStep(
            label=f"{name} {graph.phase}",
            place=graph.phase,
            group=name,
            seconds=math.nan,
            graph=lambda: graph,
            phase=graph.phase,
        )

    def why_not(self, error: Exception) -> str:
        """One line on why the step could not be used."""
        text = str(error.args[0]) if isinstance(error, LookupError) else str(error)
        why = (text.splitlines() or [""])[0]
        return why if self.group in self.place else f"{shortened(self.group)}: {why}"


def steps_of(
    measured: Run | Sequence[StepTime],
    model: ExecutionModel,
    target: str | Graphs | None,
    trust_targets: bool = False,
) -> list[MeasuredStep]:
    """The measured steps of a run that ran as `model` dispatches, or of a table.

    target: graphs by phase, or a target in which {target} stands for the name in the measurements,
    and {batch}, {seq}, {kv} (in a table also {image_size}) for its sizes.  None: rows of a run may
    name models of the suite.  trust_targets: without a target, the names in the measurements are
    targets, which are code; else a table, and other rows of a run, have no graph.  Raises
    RequestError for another name in braces, for a table without either, and where a run
    has no such step.
    """
    if isinstance(measured, Run):
        return steps_of_run(measured, model, target, trust_targets)
    return steps_of_table(measured, target, trust_targets)


def steps_of_table(
    steps: Sequence[StepTime], target: str | Graphs | None, trust_targets: bool = False
) -> list[MeasuredStep]:
    """The steps of a table.

    target: how the name in the table becomes a target, for example "models.py:{target}"; {batch},
    {seq}, {kv} and {image_size} stand for those columns.  Or graphs, if all lines are steps of one.
    """
    source = _source(target, trust_targets)
    if source is None and steps:
        raise not_run(steps[0].target)
    return [
        MeasuredStep(
            label=" ".join(str(v) for v in (step.target, step.phase, step.batch, step.seq) if v),
            place=f"line {step.line}",
            group=step.target,
            seconds=step.seconds,
            graph=partial(_graph_of_step, step, source),
            phase=step.phase,
            batch=step.batch,
            at=partial(_graph_at, step, source) if isinstance(source, TargetTemplate) else None,
        )
        for step in steps
    ]


def steps_of_run(
    run: Run,
    execution: str | ExecutionModel,
    target: str | Graphs | None = None,
    trust_targets: bool = False,
) -> list[MeasuredStep]:
    """The models of a run that ran as `execution` dispatches.

    target: graphs, or a target in which {target} stands for the row's model; without it a run that
    this process measured has its graphs, and rows of other runs name models of the suite, and with
    `trust_targets` also targets.  Raises RequestError where the run has no such row.
    """
    source = _source(target, trust_targets)
    mode = "eager" if execution_model(execution).dispatch == "eager" else "compiled"
    graphs = run.graphs if target is None else {}
    steps = [
        MeasuredStep(
            label=row.key,
            place=row.key,
            group=row.model,
            seconds=row.median,
            graph=partial(graphs.__getitem__, row.key)
            if row.key in graphs
            else partial(_graph_of_row, row, source, target is None),
            phase=row.phase,
            row=row,
        )
        for row in run.models
        if row.mode == mode
    ]
    if trust_targets and steps and all(step.row is not None and step.row.scale for step in steps):
        reason = "every row of the run is of a model of the suite"
        raise UnusedError("trust_targets", "True", reason)
    if not steps:
        raise RequestError(
            f"the run has no {mode} steps of models, only "
            f"{', '.join(sorted({row.mode for row in run.models})) or 'operations'}; measure some "
            "with `rooftrace measure`, or name another --execution"
        )
    return steps


def _source(target: str | Graphs | None, trust_targets: bool) -> TargetTemplate | Graphs | None:
    """The source of graphs; None: no name in the measurements is run."""
    if target is None:
        return TRUSTED if trust_targets else None
    return template_of(target) if isinstance(target, str) else target


def _graph_of_step(step: StepTime, source: TargetTemplate | Graphs | None) -> OpGraph:
    from rooftrace.tracer import Options, Request, trace_target

    if source is None:
        raise not_run(step.target)
    if not isinstance(source, TargetTemplate):
        return _of_phase(source, step.phase)
    name = source.filled({"target": step.target, **{n: getattr(step, n) for n in SIZES}})
    request = Request(step.batch, step.seq, step.kv)
    phases = [step.phase] if step.phase else None
    graph = next(iter(trace_target(name, phases, request, Options(dtype=step.dtype)).values()))
    return graph if step.dtype is None else reprice(graph, step.dtype)


def _graph_at(
    step: StepTime, source: TargetTemplate, batch: int | None, phase: str | None
) -> OpGraph:
    return _graph_of_step(replace(step, batch=batch, phase=phase), source)


def _graph_of_row(row: ModelRow, source: TargetTemplate | Graphs | None, of_suite: bool) -> OpGraph:
    """The graph of a row.  of_suite: a row with a scale is of a model of the suite."""
    if of_suite and row.scale:
        from rooftrace.measured.bench import traced_model

        return traced_model(row)
    if source is None or isinstance(source, TargetTemplate):
        if of_suite and not _names_a_target(row.model):
            raise RequestError(
                f"{row.key!r}: {row.model!r} is no model of the suite and names no target; say "
                "with --target what ran (in Python: target=rooftrace.trace(model, x))"
            )
        if source is None:
            raise not_run(row.model)
        sizes = {size: row.sizes.get(size) for size in ("batch", "seq", "kv")}
        return _at_sizes(source.filled({"target": row.model, **sizes}), row.phase, sizes)
    return _of_phase(source, None if row.phase == "step" else row.phase)


def _at_sizes(name: str, phase: str, sizes: Mapping[str, int | None]) -> OpGraph:
    """The graph of a phase of a target at these sizes.

    A target that makes its inputs gets no sizes; its inputs must then have these sizes.
    """
    from rooftrace.tracer import Request, trace_target

    batch, seq, kv = (sizes[size] for size in ("batch", "seq", "kv"))
    first: Exception | None = None
    for request in (Request(batch, seq, kv), Request(batch), Request()):
        try:
            graph = trace_target(name, [phase], request)[phase]
        except (RequestError, TargetError) as error:
            first = first or error
            continue
        traced = {n: graph.workload[n] for n in sizes if graph.workload.get(n) is not None}
        other = [n for n in traced if sizes[n] not in (None, traced[n])]
        if not other:
            return graph
        first = first or RequestError(
            f"{name}: measured with {other[0]} {sizes[other[0]]}, traces with {traced[other[0]]}"
        )
    raise first or RequestError(f"{name}: does not trace at the sizes that were measured")


def _names_a_target(model: str) -> bool:
    return ":" in model or model.endswith(".json") or names.is_script(model)


def _of_phase(graphs: Graphs, phase: str | None) -> OpGraph:
    """The graph of a phase, or the only one."""
    if phase is not None and phase in graphs:
        return graphs[phase]
    if phase is None and len(graphs) == 1:
        return next(iter(graphs.values()))
    raise RequestError(
        f"phase {phase or 'not given'}: the target has {', '.join(graphs) or 'none'}"
    )


# -- templates -------------------------------------------------------------------------------------
# Measurements are data, and a target is code that is imported and called.  So a name in a file is a
# target only where the user says so: with a template, or with `trust_targets`.


NAME = "target"
"""The column of the model or target."""
SIZES = ("batch", "seq", "kv", "image_size")
"""Columns of sizes; a run has no image_size."""

_LONGEST = 1000
"""Characters of a template, and of the name in a file that is put into one."""
_LARGEST = 10**15
"""The largest size that is put into a template."""
_PLACE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_WORD = re.compile(r"(?!__)[\w-]+")
_PART = r"(?!\.{1,2}(?:/|$))[\w.-]+"
_PATH = re.compile(rf"{_PART}(?:/{_PART})*")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTemplate:
    """A target with places for the name and the sizes of a measured step."""

    text: str  # of the user
    parts: tuple[tuple[str, str], ...]  # (text, name of the column that follows it or "")

    @property
    def trusts_names(self) -> bool:
        """Whether the name alone is the target: then a file may name any target."""
        return self.parts == (("", NAME),)

    @property
    def names_code(self) -> bool:
        """Whether it makes targets such as package.module:attr or path/file.py:attr."""
        return not self.text.startswith("hf:") and any(":" in text for text, _ in self.parts)

    def filled(self, values: Mapping[str, Any]) -> str:
        """The target of a step.  Raises RequestError for a value that may not stand there.

        values: by column.  A name has letters, digits, "_" and "-" only where the template names
        code, and elsewhere also "." and "/", without a leading "/" and without "..".
        """
        target = "".join(
            text + (self._checked(name, values) if name else "") for text, name in self.parts
        )
        if names.is_script(target) and not (self.trusts_names or names.is_script(self._plain)):
            raise RequestError(
                f"--target {shortened(self.text)!r}: {shortened(target)!r} is a script, which a "
                "name in a file cannot run"
            )
        return target

    @property
    def _plain(self) -> str:
        """The template with a harmless word in each place."""
        return "".join(text + ("x" if name else "") for text, name in self.parts)

    def _checked(self, name: str, values: Mapping[str, Any]) -> str:
        value = values.get(name)
        if value is None:
            raise RequestError(
                f"--target {shortened(self.text)!r} has {{{name}}}, and the step has no {name}"
            )
        if name != NAME:
            if type(value) is not int or not 0 <= value <= _LARGEST:
                raise RequestError(f"{name} is {value!r:.60}: expected a whole number")
            return str(value)
        text = str(value)
        allowed = _WORD if self.names_code else _PATH
        fits = len(text) <= _LONGEST and text.isascii() and allowed.fullmatch(text)
        if not self.trusts_names and not fits:
            expected = (
                'letters, digits, "_" and "-" (in a file it cannot name other code than the '
                "template does)"
                if self.names_code
                else 'a plain relative name, without ":" and ".."'
            )
            raise RequestError(
                f"--target {shortened(self.text)!r}: the name {shortened(text)!r}: expected "
                f"{expected}"
            )
        return text


def template_of(text: str, columns: tuple[str, ...] = (NAME, *SIZES)) -> TargetTemplate:
    """The template that a user wrote; "{{" and "}}" stand for braces.

    Only the names of columns stand in braces: nothing is looked up or formatted.  Raises
    RequestError for anything else in braces.
    """
    if len(text) > _LONGEST:
        raise RequestError(
            f"--target {shortened(text)!r}: {len(text):,} characters; expected at most {_LONGEST:,}"
        )
    parts, literal, end = [], "", 0
    for place in _PLACE.finditer(text):
        literal += text[end : place.start()]
        end = place.end()
        if place[0] in ("{{", "}}"):
            literal += place[0][0]
        elif place[1] in columns:
            parts.append((literal, place[1]))
            literal = ""
        else:
            raise RequestError(
                f"--target {shortened(text)!r}: {shortened(place[0])!r}: expected some of "
                f"{', '.join(f'{{{name}}}' for name in columns)}"
            )
    literal += text[end:]
    return TargetTemplate(text=text, parts=(*parts, (literal, "")) if literal else tuple(parts))


def shortened(text: str, most: int = 60) -> str:
    """A text, cut to a length for messages."""
    return text if len(text) <= most else f"{text[:most]}…"


def not_run(name: str) -> RequestError:
    """The error of a name in a file that the user did not declare a target."""
    return RequestError(
        f"{shortened(name)!r} stands in a file of measurements, and what such a file names is not "
        'run: say with --target what it stands for, for example --target "models.py:{target}", or '
        "--trust-targets if you trust every name in the file"
    )


TRUSTED = template_of(f"{{{NAME}}}")
"""The template of `trust_targets`: each name is a target."""
