"""Measures a user's module, steps or target on a device: wall time, and the time of every op."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rooftrace.costmodels.fusion import execution_model, plan
from rooftrace.errors import RequestError, TargetError, one_of
from rooftrace.graph import OpGraph
from rooftrace.measured.alignment import KernelTime, kernel_times
from rooftrace.measured.bench import machine
from rooftrace.measured.bench.clock import Bench
from rooftrace.measured.bench.replay import Compilations, attributed
from rooftrace.measured.bench.runfile import MicroRow, ModelRow, Run
from rooftrace.measured.bench.steps import (
    RealStep,
    StepProfile,
    TimedStep,
    by_op,
    profiled,
    profiler,
    real_inputs,
    real_step,
    realized,
    timed,
)
from rooftrace.measured.profiles import read_trace
from rooftrace.tracer import Request, names, torch_private
from rooftrace.tracer.inputs import as_before, calls
from rooftrace.tracer.recording import check_not_inside
from rooftrace.tracer.values import dtype_name

WARMUPS = 2
_PROFILES = 5
"""A compiled step is profiled so often, if its budget allows."""
_T = TypeVar("_T")


def measure(
    model: nn.Module,
    *args: Any,
    phase: str = "forward",
    loss: Callable[[Any], Any] | None = None,
    optimizer: str = "adamw",
    compiled: bool = False,
    ops: bool = True,
    budget_s: float = 10.0,
    name: str = "",
    **kwargs: Any,
) -> Run:
    """Time a step of `model`, called with these arguments on its device, and each op of its graph.

    The step is that of `rooftrace.trace` with the same arguments: forward, prefill, decode (one
    token after the prompt that is given), or training with an optimizer.  Afterwards tensors of
    the module and its arguments, and the state of random generators, are restored from a copy on
    the host.

    compiled: the step is run through torch.compile.  ops: the captured graph is also run op by op,
    eagerly, and the row's `ops` have the ids of `rooftrace.trace(model, ..., phase=phase)`; of a
    compiled step the row has its `kernels` too, which `rooftrace.tools.fused` compares with the
    graph.
    budget_s: about how long the timed repetitions may take.

    The result is a run with one row, `run.models[0]`, and with its graph, so that `calibrate(run)`
    needs nothing else.  Raises RequestError for a model on meta, a phase that it does not have, and
    inside of a recording; and the errors of the model.
    """
    check_not_inside("measure", "measure before it or after it")
    device = _device(model)
    bench = Bench(device, budget_s, lambda line: None)
    row, graph = _measured(
        bench,
        model,
        args,
        kwargs,
        phase=phase,
        name=name or type(model).__name__,
        loss=loss,
        optimizer=optimizer,
        compiled=compiled,
        ops=ops,
    )
    run = run_of(device, row)
    return run if graph is None else replace(run, graphs={row.key: graph}, micro=(_stream(bench),))


def _stream(bench: Bench) -> MicroRow:
    """The row of a copy beyond the caches, for the bandwidth that this device sustains now."""
    size, seconds = machine.copy_seconds(bench)
    sizes: dict[str, int | str | bool] = {"op": "copy_", "dtype": "fp32"}
    return MicroRow(
        key=f"copy {size // 2**20} MiB", kind="copy", sizes=sizes, seconds=seconds, bytes=size
    )


def measured_row(
    bench: Bench, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], **how: Any
) -> ModelRow:
    """The row of one phase of a model; see `measure`."""
    return _measured(bench, model, args, kwargs, **how)[0]


def _measured(
    bench: Bench,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    phase: str,
    name: str,
    loss: Callable[[Any], Any] | None = None,
    optimizer: str = "adamw",
    compiled: bool = False,
    ops: bool = True,
) -> tuple[ModelRow, OpGraph | None]:
    """The row of one phase of a model, and its graph if its ops were measured."""
    inputs = real_inputs(model, args, kwargs)
    with as_before(model, (args, kwargs)):
        noted = Compilations() if compiled and ops else None
        options = noted.options if noted else None
        step = real_step(model, inputs, phase, optimizer, loss, compiled, options)
        times = timed(bench, step, bench.budget_s, WARMUPS)
        graph = _graph(model, args, kwargs, phase, loss, optimizer) if ops else None
        attribution: dict[str, Any] = {}
        if noted and noted.trouble:
            attribution = {"note": f"kernels are not known: {noted.trouble}"}
        elif noted and graph:
            attribution = {"kernels": _kernels(bench, step, noted, graph)}
        del step
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        tensors: dict[str, Tensor] = {name: tensor.detach() for name, tensor in state.items()}
        call = ((), inputs.decode or {}) if phase == "decode" else (args, kwargs)
        tensors |= dict(calls.named_inputs(model, *call))
        if graph is not None:
            result = attributed(bench, graph, tensors)
            attribution |= {
                "device_seconds": result.seconds,
                "unattributed": result.unattributed,
                "source": "replay",
                "ops": result.ops,
            }
    mode = "compiled" if compiled else "eager"
    sizes = {key: inputs.workload[key] for key in ("batch", "seq", "kv") if key in inputs.workload}
    floating = [p for p in model.parameters() if p.is_floating_point()]
    row = ModelRow(
        key=ModelRow.key_of(name, phase, mode, sizes),
        model=name,
        phase=phase,
        mode=mode,
        sizes=sizes,
        seconds=times.seconds,
        dtype=dtype_name(floating[0].dtype) if floating else "",
        parameters=sum(p.numel() for p in model.parameters()),
        peak_bytes=times.peak_bytes,
        resident_bytes=times.resident_bytes,
        **attribution,
    )
    return row, graph


def _kernels(
    bench: Bench, step: RealStep, noted: Compilations, graph: OpGraph
) -> tuple[KernelTime, ...]:
    """The kernels of a compiled step by the profiler, each with its ops.

    Of several profiles each kernel has its median, as another process may run during one.
    """
    compiled = plan(graph.expand(), execution_model("compiled")).graph

    def once() -> tuple[KernelTime, ...]:
        state = step.ready()
        with profiler(bench.device) as recorded:
            bench.wall(lambda: step.run(state))
        return _recorded_kernels(recorded, noted, compiled)

    profiles = [once()]
    begin = time.perf_counter()
    while len(profiles) < _PROFILES and time.perf_counter() - begin < bench.budget_s:
        profiles.append(once())
    return _medians(profiles)


def _medians(profiles: Sequence[tuple[KernelTime, ...]]) -> tuple[KernelTime, ...]:
    """The kernels of the quickest profile, with their median over profiles of equal kernels."""
    quickest = min(profiles, key=lambda kernels: sum(kernel.seconds for kernel in kernels))
    names = [kernel.name for kernel in quickest]
    equal = [kernels for kernels in profiles if [kernel.name for kernel in kernels] == names]
    return tuple(
        replace(kernels[0], seconds=statistics.median(kernel.seconds for kernel in kernels[1:]))
        for kernels in zip(quickest, *equal, strict=True)
    )


def _recorded_kernels(
    recorded: Any, noted: Compilations, compiled: OpGraph
) -> tuple[KernelTime, ...]:
    """The kernels of the step that a profiler recorded, each with its ops."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.json"
        recorded.export_chrome_trace(str(path))
        return kernel_times(read_trace(path), noted.graphs(), compiled)


def profiled_step(
    bench: Bench,
    module: nn.Module,
    kwargs: Mapping[str, Any],
    phase: str,
    compiled: bool,
    seconds: float,
) -> tuple[TimedStep, StepProfile]:
    """Time a step of a module for about so many seconds, then run it once under the profiler.

    The module is called with `kwargs`; for decode they are the prompt.  Training changes its
    weights.  Raises the errors of `real_step` and of the module; no gradient is left behind.
    """
    try:
        step = real_step(module, real_inputs(module, (), kwargs), phase, compiled=compiled)
        times = timed(bench, step, seconds, warmups=3 if compiled else WARMUPS)
        return times, _profile(bench, step)
    finally:
        for parameter in module.parameters():  # of a step that failed halfway
            parameter.grad = None


def _profile(bench: Bench, step: RealStep) -> StepProfile:
    """The profile of one step by op; on a CPU the quicker of two, as the profiler warms up."""

    def once() -> StepProfile:
        state = step.ready()
        return by_op(profiled(bench, lambda: step.run(state))[0], bench.on_cuda)

    first = once()
    return first if bench.on_cuda else min(first, once(), key=lambda profile: profile.seconds)


def run_of(device: torch.device, *rows: ModelRow) -> Run:
    """A run with these rows, on this device, today."""
    today = time.strftime("%Y-%m-%d", time.gmtime())
    return Run(
        device=machine.device_facts(device),
        versions=machine.versions(),
        dates=(today,),
        models=rows,
    )


def _device(model: Any) -> torch.device:
    if not isinstance(model, nn.Module):
        raise RequestError(
            f"expected a torch.nn.Module to measure, got {type(model).__name__}: {model!r:.80}; "
            "a step of your own is measured inside `with rooftrace.measuring() as steps:`"
        )
    tensors = (*model.parameters(), *model.buffers())
    devices = {tensor.device for tensor in tensors} or {torch.device("cpu")}
    if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        where = ", ".join(sorted(map(str, devices)))
        raise RequestError(
            f"{type(model).__name__} is on {where}: expected all of it on one device, cpu or "
            "cuda; move it there with .to(), or from meta with .to_empty()"
        )
    return devices.pop()


def _graph(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    phase: str,
    loss: Callable[[Any], Any] | None,
    optimizer: str,
) -> OpGraph:
    from rooftrace.tracer import trace

    return trace(model, *args, phase=phase, loss=loss, optimizer=optimizer, **kwargs)


# -- steps that the user writes --------------------------------------------------------------------


class StepTimer:
    """Times steps that the user writes: each inside `with steps.step():`.

    The first ones warm up; the next is profiled, with `profile`; the rest are timed.
    """

    def __init__(
        self, name: str, device: str, profile: bool, compiled: bool, graph: OpGraph | None
    ) -> None:
        self._name, self._profile, self._compiled = name, profile, compiled
        self._graph = graph
        self._noted: Compilations | None = None  # of modules from `compile`
        self._bench = Bench(torch.device(device), 1.0, lambda line: None)
        self._count = 0
        self._seconds: list[float] = []
        self._profile_fields: dict[str, Any] = {}
        self._run: Run | None = None

    def compile(self, module: Callable[..., _T], **settings: Any) -> Callable[..., _T]:
        """`torch.compile(module, **settings)`, so that the profiled step knows its kernels' ops.

        Without caches of earlier compilations.  Raises RequestError without `compiled=True`, and
        for a `mode`: its options do the same.
        """
        if not self._compiled:
            raise RequestError("steps.compile(...): expected measuring(..., compiled=True)")
        if settings.get("mode") is not None:
            raise RequestError(
                f"steps.compile(..., mode={settings['mode']!r}): torch.compile takes a mode or "
                "options, and these are used here; pass "
                f"options=torch._inductor.list_mode_options({settings['mode']!r})"
            )
        self._noted = self._noted or Compilations()
        options = {**(settings.pop("options", None) or {}), **self._noted.options}
        compiled: Callable[..., _T] = torch.compile(module, options=options or None, **settings)
        return compiled

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One step, from an idle device to an idle device."""
        profiles = self._profile and self._count == WARMUPS
        self._count += 1
        if profiles:
            with self._profiled():
                yield
            return
        self._bench.synchronize()
        start = time.perf_counter()
        yield
        self._bench.synchronize()
        if self._count > WARMUPS:
            self._seconds.append(time.perf_counter() - start)
        elif self._bench.on_cuda:
            torch.cuda.reset_peak_memory_stats(self._bench.device)

    @contextlib.contextmanager
    def _profiled(self) -> Iterator[None]:
        with profiler(self._bench.device) as recorded:
            yield
            self._bench.synchronize()
        profile = by_op(recorded.events(), self._bench.on_cuda)
        self._profile_fields = {
            "device_seconds": profile.seconds,
            "unattributed": profile.unattributed,
            "source": "profiler",
            "ops": profile.ops,
        }
        if self._noted is not None and self._graph is not None and not self._unknown():
            compiled = plan(self._graph.expand(), execution_model("compiled")).graph
            kernels = _recorded_kernels(recorded, self._noted, compiled)
            self._profile_fields["kernels"] = kernels

    def _unknown(self) -> str:
        """Why the kernels of a compiled step are unknown; "" where they are known."""
        if not self._profile:
            return "no step was profiled"
        if self._noted is None:
            return "compile the module inside the block, with steps.compile(module)"
        if self._graph is None:
            return "pass the graph of the step, measuring(..., graph=rooftrace.trace(...))"
        return self._noted.trouble

    @property
    def run(self) -> Run:
        """The run with one row.  Raises RequestError inside of the block."""
        if self._run is None:
            raise RequestError("the run of measured steps is there after their block has ended")
        return self._run

    def close(self) -> None:
        """Make the row.  Raises RequestError where no step was timed."""
        first = WARMUPS + self._profile
        if not self._seconds:
            raise RequestError(
                f"{self._count} steps ran: the first {first} warm up and are profiled; "
                f"run at least {first + 1}, each inside `with steps.step():`"
            )
        mode = "compiled" if self._compiled else "eager"
        peak = resident = None
        if self._bench.on_cuda:
            peak = int(torch.cuda.max_memory_allocated(self._bench.device))
            resident = int(torch.cuda.memory_allocated(self._bench.device))
        unknown = self._unknown() if self._compiled else ""
        row = ModelRow(
            key=ModelRow.key_of(self._name, "step", mode, {}),
            model=self._name,
            phase="step",
            mode=mode,
            sizes={},
            seconds=tuple(self._seconds),
            peak_bytes=peak,
            resident_bytes=resident,
            note=f"kernels are not known: {unknown}" if unknown else "",
            **self._profile_fields,
        )
        self._run = run_of(self._bench.device, row)


@contextlib.contextmanager
def measuring(
    name: str = "step",
    device: str | None = None,
    profile: bool = True,
    compiled: bool = False,
    graph: OpGraph | None = None,
) -> Iterator[StepTimer]:
    """Time steps that you write: any code, as often as you run it.

        with rooftrace.measuring("fine-tuning") as steps:
            for batch in batches:
                with steps.step():
                    train(batch)
        steps.run.models[0].median  # seconds

    The first two steps warm up, the third goes through the profiler (profile=False: none does), the
    rest are timed.  device: the device whose work ends a step; default cuda where there is one.
    compiled: whether the run says "compiled" or "eager".  graph: of a compiled step; where the
    module is compiled inside the block, with `model = steps.compile(model)`, the row has the
    kernels of that step, which `rooftrace.tools.fused` compares with this graph; else its `note`
    says why not.  Raises RequestError at the end where no step was timed, for a graph of a step
    that is not compiled, and inside of a recording.
    """
    check_not_inside("measuring", "measure before it or after it")
    if graph is not None and not compiled:
        raise RequestError("measuring(..., graph=...): expected compiled=True with it")
    steps = StepTimer(name, device or machine.default_device(), profile, compiled, graph)
    yield steps
    steps.close()


# -- targets ---------------------------------------------------------------------------------------

_SECONDS = 3.0
"""Budget for the repetitions of one phase."""


def measured_target(
    target: str,
    request: Request | None = None,
    phases: Sequence[str] | None = None,
    compiled: bool = False,
    device: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Run:
    """Time each phase of a target, and each op or compiled kernel of it, on a device.

    phases: by default all of the target.  device: by default cuda where there is one.
    Weights and inputs are random.  Raises TargetError or RequestError for a target, sizes or a
    phase that make no sense, and the errors of the module.
    """
    if names.is_script(target):
        raise RequestError(
            f"--run {target!r}: a script is measured into a file, rooftrace measure {target!r} "
            "-o run.json.gz; then calibrate by it: rooftrace calibrate run.json.gz --trust-targets"
        )
    tell = progress or (lambda _: None)
    check_phases(phases)
    bench = Bench(machine.checked_device(device or machine.default_device()), _SECONDS, tell)
    module, args, kwargs = realized(target, bench, request)
    runs: list[Run] = []
    missing: RequestError | None = None
    for phase in phases or names.MEASURED:
        tell(f"measuring {phase}{', compiled' if compiled else ''}")
        if compiled:
            torch_private.dynamo_reset()
        try:
            runs.append(
                measure(
                    module,
                    *args,
                    phase=phase,
                    compiled=compiled,
                    budget_s=_SECONDS,
                    name=target,
                    **kwargs,
                )
            )
        except RequestError as error:  # a phase that the target lacks
            if phases:
                raise
            missing = error
    if not runs:
        raise TargetError(f"{target}: no phase of it can be measured: {missing}")
    return reduce(_joined, runs)


def check_phases(phases: Sequence[str] | None) -> None:
    """Raise RequestError for a phase that cannot be measured."""
    for phase in phases or ():
        if phase not in names.MEASURED:
            raise RequestError(f"phase {phase!r:.60}: {one_of(phase, names.MEASURED)}")


def _joined(first: Run, second: Run) -> Run:
    """Two runs of one device as one, with the quicker copy."""
    return replace(
        first,
        models=(*first.models, *second.models),
        micro=(min(first.micro + second.micro, key=lambda row: row.median),),
        graphs={**first.graphs, **second.graphs},
    )
