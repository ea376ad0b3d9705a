"""The measurement suite: operations alone, then whole models, on one device, into one file.

It needs torch only; models that come from transformers are left out where it is missing.  A case
that fails is recorded and the next one runs; a second start on the same file continues the first.
"""

from __future__ import annotations

import contextlib
import fnmatch
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rooftrace.errors import RequestError, TargetError
from rooftrace.measured.bench import machine, operations
from rooftrace.measured.bench.clock import Bench, MeasureError, pinned_threads
from rooftrace.measured.bench.measurement import check_phases, measured_row, profiled_step
from rooftrace.measured.bench.models import MODELS, Make, Sizes, SuiteModel
from rooftrace.measured.bench.operations import MicroCase, NotOfferedError
from rooftrace.measured.bench.runfile import MicroRow, ModelRow, Run
from rooftrace.measured.bench.session import (
    Clock,
    Hang,
    Session,
    SuitePlan,
    first_line,
    free,
    script_rows,
)
from rooftrace.measured.bench.steps import realized
from rooftrace.tracer import Request, names, torch_private
from rooftrace.tracer.values import dtype_name

_FULL_FLOPS = 2e13
"""The least FLOP/s of a device that runs models at full size."""
_SCRIPT_S = 120.0
"""Seconds that a script may run."""
_SELDOM_COMPILED = ("experts", "recurrent")
"""Kinds of models that the compiler splits into pieces; they are compiled only if named."""


def measure_suite(
    plan: SuitePlan,
    progress: Callable[[str], None] = print,
    on_hang: Hang | None = None,
    clock: Clock = time.monotonic,
) -> Run:
    """Measure the cases of `plan` into its file, and return the run in that file.

    on_hang: called from another thread if a case cannot be interrupted; None waits.  clock: tells
    the time for the budget.  Raises MeasureError for a device that does not exist or was lost, or a
    file of another device; ProfileError for a file that is no run; TargetError for an unknown name.
    """
    if not (math.isfinite(plan.budget_s) and plan.budget_s > 0):
        raise MeasureError(f"--budget {plan.budget_s!r}: expected a number of seconds above 0")
    check_phases(plan.phases)
    device = machine.checked_device(plan.device)
    deadline = clock() + plan.budget_s
    targets = _targets(plan)
    run = _started(plan, device)
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        pinned = device.type == "cpu" and stack.enter_context(pinned_threads())
        bench = Bench(device, 1.0, progress, pinned=pinned)
        session = Session(plan, bench, run, deadline, on_hang, clock)
        stack.callback(session.flush)
        stack.callback(session.stop_watch)
        session.note(machine.load_note())
        if pinned:
            session.note("each thread was kept on a core of its own")
        if plan.names:
            _named_cases(session, *targets)
        else:
            _every_case(session)
        session.clock("end")
    return session.run


def _started(plan: SuitePlan, device: torch.device) -> Run:
    """The run in the file, to go on with, or a new one.  Raises MeasureError for another device."""
    facts, libraries = machine.device_facts(device), machine.versions()
    today = time.strftime("%Y-%m-%d", time.gmtime())
    if not plan.out.exists():
        return Run(device=facts, versions=libraries, dates=(today,))
    run = Run.load(plan.out)
    here = [facts.get(key) for key in machine.IDENTITY] + [libraries["torch"]]
    there = [run.device.get(key) for key in machine.IDENTITY] + [run.versions.get("torch")]
    if here != there:
        raise MeasureError(
            f"{plan.out} holds measurements of {_described(run.device, run.versions)}; this is "
            f"{_described(facts, libraries)}: name another file with --out"
        )
    dates = run.dates if today in run.dates else (*run.dates, today)
    return replace(run, dates=dates)


def _described(device: Any, libraries: Any) -> str:
    threads = f", {device['threads']} threads" if device.get("threads") else ""
    return f"{device.get('name')} ({device.get('type')}{threads}, torch {libraries.get('torch')})"


# -- operations ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speed:
    """Rough upper speeds of a device."""

    flops: float  # FLOP/s of a product
    bandwidth: float  # byte/s of a copy
    memory: float  # byte that may be used

    def floor(self, case: MicroCase) -> float:
        """A lower estimate of the seconds of one call, in the usual precision.

        Only matrix products run on the fastest units.
        """
        engine = 1.0 if "matmul" in case.kind or case.kind == "attention_prefill" else 0.2
        return case.flops / (engine * self.flops) + case.bytes / self.bandwidth


def probed(bench: Bench) -> Speed:
    """The speed of the device, in a second."""
    size, dtype = (4096, torch.bfloat16) if bench.on_cuda else (512, torch.float32)
    with torch.inference_mode():
        left = bench.random(size, size, dtype=dtype)
        times = bench.repeat(lambda: bench.once(lambda: left @ left), 0.1)
        data = bench.random(2**28 if bench.on_cuda else 2**23)
        copies = bench.repeat(lambda: bench.once(data.clone), 0.1)
    if bench.on_cuda:
        memory = float(torch.cuda.mem_get_info(bench.device)[0])
    else:
        memory = 2.0**32
    return Speed(2 * size**3 / min(times), 2 * data.nbytes / min(copies), memory)


def in_order(cases: Iterable[MicroCase], speed: Speed) -> list[MicroCase]:
    """The cases in order of trial: kinds alternate; in each, every fourth by cost first."""
    kinds: dict[str, list[MicroCase]] = {}
    for case in sorted(cases, key=speed.floor):
        kinds.setdefault(case.kind, []).append(case)
    queues = [
        [case for start in range(4) for case in of_kind[start::4]] for of_kind in kinds.values()
    ]
    longest = max((len(queue) for queue in queues), default=0)
    return [queue[turn] for turn in range(longest) for queue in queues if turn < len(queue)]


def _affordable(session: Session, speed: Speed) -> list[MicroCase]:
    """The cases whose call is short enough and whose data fits, in order of trial."""
    most = 0.002 if session.plan.quick else 0.03
    cases = [
        case
        for case in operations.micro_cases(session.bench.on_cuda)
        if speed.floor(case) <= most and 2 * operations.footprint(case) < speed.memory
    ]
    ordered = in_order(cases, speed)
    return ordered[:: max(1, len(ordered) // 120)] if session.plan.quick else ordered


def _operations(session: Session, cases: Sequence[MicroCase], speed: Speed, until: float) -> None:
    """Try cases while more than `until` seconds of the budget are left."""
    repeated = 0.02 if session.plan.quick else 0.1
    for case in cases:
        expected = 10 * speed.floor(case) + 4 * operations.footprint(case) / speed.bandwidth + 0.01
        if session.is_done(case.key):
            continue
        if session.left() - expected < until:
            return
        session.attempt(case.key, 30.0, lambda case=case: _micro_row(session, case, repeated))  # type: ignore[misc]


def _micro_row(session: Session, case: MicroCase, seconds: float) -> MicroRow:
    times = operations.measured(case, session.bench, seconds)
    flops = None if case.sampler else case.flops
    moved = None if case.sampler else case.bytes
    return MicroRow(
        key=case.key, kind=case.kind, sizes=case.sizes, seconds=times, flops=flops, bytes=moved
    )


# -- models ----------------------------------------------------------------------------------------


def _every_case(session: Session) -> None:
    """Operations and models in turns, so that a short budget has something of each."""
    total = session.left()
    speed = probed(session.bench)
    session.clock("after a large product and a copy")
    cases = _affordable(session, speed)
    scale = _scale(session, speed)
    models = [model for model in MODELS if scale in model.settings]
    compiling = [model for model in models if model.kind not in _SELDOM_COMPILED]
    compiling = compiling[:3] if session.plan.quick else compiling  # compiling takes long
    _operations(session, cases, speed, until=0.68 * total)
    _models(session, models, scale, slice(0, 3), False, until=0.32 * total)
    _models(session, compiling, scale, slice(0, 1), True, until=0.1 * total)
    _operations(session, cases, speed, until=0.0 if session.plan.quick else 0.05 * total)
    _models(session, models, scale, slice(3, None), False, until=0.0)
    _models(session, models, scale, slice(0, 3), False, until=0.0)
    _models(session, compiling, scale, slice(0, 2), True, until=0.0)
    for case in cases:
        session.leave_out(case.key, "the budget ended")
    session.clock("under load")


def _scale(session: Session, speed: Speed) -> str:
    if session.plan.quick:
        return "tiny"
    return "full" if speed.flops >= _FULL_FLOPS and speed.memory >= 2e10 else "small"


def _models(
    session: Session,
    models: Sequence[SuiteModel],
    scale: str,
    which: slice,
    compiled: bool,
    until: float,
) -> None:
    """Try these steps of the models while more than `until` seconds of the budget are left."""
    for model in models:
        steps = model.steps.get(scale, ())[which]
        if compiled:  # the most usual steps of each model
            steps = [step for step in steps if step[0] != "training"][:2]
        _steps_of(session, model, scale, steps, compiled, until)


def _expected(scale: str, compiled: bool) -> float:
    """Expected seconds of a step, with making and compiling its model."""
    usual = {"full": 6.0, "small": 4.0, "tiny": 0.5}[scale]
    return usual + (30.0 if scale == "full" else 15.0) * compiled


def _steps_of(
    session: Session,
    model: SuiteModel,
    scale: str,
    steps: Sequence[tuple[str, Sizes]],
    compiled: bool,
    until: float,
) -> None:
    mode = "compiled" if compiled else "eager"
    keys = [ModelRow.key_of(model.name, phase, mode, sizes, scale) for phase, sizes in steps]
    if not model.there():
        for key in keys:
            session.leave_out(key, f"needs {model.library}, which is not installed")
        return
    built: list[torch.nn.Module] = []
    for key, (phase, sizes) in zip(keys, steps, strict=True):
        if session.is_done(key):
            continue
        if session.left() - _expected(scale, compiled) < until:
            session.leave_out(key, "the budget ended")
            continue

        def work(phase: str = phase, sizes: Sizes = sizes, key: str = key) -> ModelRow:
            _quiet(model.library)
            if not built:
                dtype = model.dtype(session.bench.device.type)
                built.append(model.made(scale, str(session.bench.device), dtype))
            return _model_row(session, built[0], model, scale, phase, sizes, compiled, key)

        session.attempt(key, 240.0 if compiled else 120.0, work)
    built.clear()
    if steps:
        if torch_private.DYNAMO in sys.modules:
            torch_private.dynamo_reset()
        free()


def _quiet(library: str) -> None:
    if library == "transformers":
        import transformers

        transformers.logging.set_verbosity_error()


def _model_row(
    session: Session,
    module: torch.nn.Module,
    model: SuiteModel,
    scale: str,
    phase: str,
    sizes: Sizes,
    compiled: bool,
    key: str,
) -> ModelRow:
    bench = session.bench
    dtype = model.dtype(bench.device.type)
    make = Make.on(str(bench.device), dtype, model.channels_last)
    kwargs = model.inputs(model.settings[scale], sizes, make)
    seconds = {"full": 1.5, "small": 1.5, "tiny": 0.1}[scale]
    times, profile = profiled_step(bench, module, kwargs, phase, compiled, seconds)
    complete = bench.on_cuda or not compiled  # the profiler sees no generated kernel of a CPU
    return ModelRow(
        key=key,
        model=model.name,
        phase=phase,
        mode="compiled" if compiled else "eager",
        sizes=sizes,
        seconds=times.seconds,
        kind=model.kind,
        scale=scale,
        dtype=dtype_name(dtype),
        parameters=sum(p.numel() for p in module.parameters()),
        device_seconds=profile.seconds if complete else None,
        unattributed=profile.unattributed if complete else None,
        source="profiler",
        ops=profile.ops,
        peak_bytes=times.peak_bytes,
        resident_bytes=times.resident_bytes,
    )


# -- models and targets by name --------------------------------------------------------------------


def _targets(plan: SuitePlan) -> tuple[list[SuiteModel], list[str]]:
    """The models of the suite and the other targets with the plan's names.

    Raises TargetError for a name that is neither.
    """
    models: list[SuiteModel] = []
    others: list[str] = []
    for name in plan.names:
        matching = [m for m in MODELS if fnmatch.fnmatchcase(m.name, name)]
        models += [model for model in matching if model not in models]
        if matching:
            continue
        if not (_names_a_target(name) or names.is_script(name)):
            there = ", ".join(model.name for model in MODELS)
            raise TargetError(
                f"{name!r} is no model of the suite ({there}); a target of your own is "
                "path/file.py:attr, package.module:attr, a Hugging Face config.json or a script"
            )
        others.append(name)
    return models, others


def _names_a_target(name: str) -> bool:
    return ":" in name or name.endswith(".json") or Path(name).is_dir()


def _named_cases(session: Session, models: Sequence[SuiteModel], others: Sequence[str]) -> None:
    if models:
        scale = _scale(session, probed(session.bench))
        for compiled in (False, True):
            _models(session, [m for m in models if scale in m.settings], scale, slice(None),
                    compiled, until=0.0)  # fmt: skip
    for target in others:
        if names.is_script(target):
            _script(session, target)
        else:
            _target(session, target)


def _script(session: Session, target: str) -> None:
    """Time the steady iterations of a script, a row for each kind."""
    plan = session.plan
    if plan.phases or plan.batch is not None or plan.seq is not None:
        raise RequestError(
            f"--phase, --batch, --seq: {target!r} is a script, whose sizes are options of its own"
        )
    rows: list[ModelRow] = []

    def work() -> ModelRow:
        budget = max(min(_SCRIPT_S, session.left()), 1.0)
        rows.extend(script_rows(target, replace(session.bench, budget_s=budget)))
        return rows[0]

    session.attempt(target, 2 * _SCRIPT_S, work)
    for row in rows[1:]:
        session.add(row)


def _target(session: Session, target: str) -> None:
    """Measure every phase of a target with random weights, and each op of its graph."""
    plan = session.plan
    request = Request(plan.batch, plan.seq)
    sizes = {k: v for k, v in (("batch", plan.batch), ("seq", plan.seq)) if v is not None}
    loaded: list[Any] = []
    for phase in plan.phases or names.MEASURED:
        key = ModelRow.key_of(target, phase, "eager", sizes)

        def work(phase: str = phase, key: str = key) -> ModelRow:
            if not loaded:
                loaded.append(realized(target, session.bench, request))
            module, args, kwargs = loaded[0]
            bench = replace(session.bench, budget_s=2.0)
            try:
                row = measured_row(bench, module, args, kwargs, phase=phase, name=target)
            except RequestError as error:  # a phase that the target lacks
                raise NotOfferedError(first_line(error)) from error
            return replace(row, key=key)

        if session.left() <= 0:
            session.leave_out(key, "the budget ended")
        else:
            session.attempt(key, 240.0, work)


def summary(run: Run, path: Path) -> str:
    """A few lines on the contents of a run, with its first errors."""
    lines = [f"{run.counts} -> {path}"]
    lines += [f"  {trouble.key}: {trouble.reason}" for trouble in run.errors[:10]]
    if len(run.errors) > 10:
        lines.append(f"  and {len(run.errors) - 10} more errors")
    return "\n".join(lines)
