"""The graphs of a target that is a script: its steps, found while it runs."""

from __future__ import annotations

import sys
import tempfile

from rooftrace._progress import tell
from rooftrace.errors import RequestError, TargetError
from rooftrace.hardware import load_chip
from rooftrace.hardware.chip import USUAL
from rooftrace.hardware.systems import load_system
from rooftrace.tracer.asking import Job, names
from rooftrace.tracer.graph import Assumption, OpGraph


def script_graphs(job: Job) -> dict[str, OpGraph]:
    """The steady steps of a script, by phase.

    What it prints goes to stderr; the files that it writes are gone afterwards.  Raises ScriptError
    where it fails, and TargetError where nothing of it ran on the device.
    """
    from rooftrace.tracer.scripts import ScriptError, ScriptRequest

    asked = names.ScriptCommand.of(job.name)
    joined = None if asked.system is None else load_system(asked.system)
    if joined is not None and asked.chip is not None:
        raise RequestError(f"target {job.name!r}: --chip beside --system, which has its own chip")
    chip = load_chip(asked.chip or USUAL) if joined is None else joined.joined_chip
    tell(f"running {asked.where}")
    with tempfile.TemporaryDirectory(prefix="rooftrace-") as folder:
        request = ScriptRequest(
            command=asked.words,
            chip=chip,
            steps=asked.steps or names.STEPS,
            ranks=asked.ranks,
            rank=asked.rank,
            per_node=None if joined is None else joined.levels[0].size,
            scratch=folder,
            assume=job.options.assume,
            boundary=asked.boundary,
        )
        script = request.run(stdout=sys.stderr)
    if script.failure is not None:
        raise ScriptError(script)
    if script.code and not script.stretches:
        chosen = script.said.get("choices", "")
        text = f"target {job.name!r}: the script exited with code {script.code}"
        raise TargetError(f"{text}\n{chosen}" if chosen else text)
    graphs = {phase: _said(graph, asked) for phase, graph in script.by_phase().items()}
    if not graphs:
        raise TargetError(
            f"target {job.name!r}: it ran as a script, and nothing of it ran on the device; to "
            f"trace a module of it, name that: {asked.where}:NAME"
        )
    return job.of_phases(graphs, RequestError, job.name)


def _said(graph: OpGraph, asked: names.ScriptCommand) -> OpGraph:
    """The graph, which says what its script saw where nobody chose it."""
    if asked.chip or asked.system:
        return graph
    text = f"the script saw an {USUAL}, whatever chip is priced; run:--chip NAME shows it another"
    number = max((item.id for item in graph.assumptions), default=-1) + 1
    seen = Assumption(id=number, kind="device", where="", text=text, value=USUAL)
    return graph.replace(assumptions=(*graph.assumptions, seen))
