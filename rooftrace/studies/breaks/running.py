"""Runs one step of a module under Dynamo, without a compiler behind it."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from rooftrace._progress import tell
from rooftrace.errors import RequestError, one_of
from rooftrace.graph import OpGraph
from rooftrace.hardware.units import format_capacity
from rooftrace.studies.breaks import placing
from rooftrace.studies.breaks.functions import OURS, DynamoFunctions, kept
from rooftrace.studies.breaks.placing import DynamoError, DynamoRun
from rooftrace.tracer import (
    Job,
    names,
    source as lines,
    source_line,
    torch_private,
    users_traceback,
)
from rooftrace.tracer.inputs import Inputs, Loaded, as_before, calls as arguments
from rooftrace.tracer.phases import ModuleCalls, collector_paused, loaded, trace_phases
from rooftrace.tracer.recording import Runner, Tape, info_of, overrides
from rooftrace.tracer.targets import isolation
from rooftrace.tracer.values import REAL_VALUE, Values, on_meta, own_tensors, tensors_in

MOST_REAL = 1 << 30
"""Bytes of weights with which a module is run on numbers, where meta tensors do not do."""


def run_dynamo(made: Loaded, phase: str) -> DynamoRun:
    """One step of a module at a phase under Dynamo: its graphs, and why they end.

    In training that is the forward; autograd cuts the backward where forward is cut.  The module is
    run on meta tensors; code that asks for values goes as in a trace.  Where that does not do, a
    small module is run on numbers.  Raises DynamoError, which names the line.
    """
    check_enabled()
    tell("running Dynamo")
    with ExitStack() as stack:
        stack.enter_context(overrides.apart())
        stack.enter_context(torch.inference_mode(False))
        module = on_meta(_plain(made.module))
        stack.enter_context(as_before(module))
        stack.enter_context(overrides.draws_undone(devices=True))
        if phase == "training":
            made = replace(made, inputs=made.inputs.trained(module))
        # Code that says no device makes tensors on the CPU, as it would beside a GPU.  Where these
        # do not go with the others, they are made on meta, which Dynamo sees as another mode.
        with contextlib.suppress(_CallError):
            return _run(module, made.inputs, phase, makes="cpu")
        try:
            return _run(module, made.inputs, phase, makes="meta")
        except _CallError as failed:
            error = failed.cause
        try:
            numbers = _with_numbers(made.module, made.inputs)
        except _TooLargeError as large:
            raise _failed(error, made.module, str(large)) from error
        try:
            return _run(*numbers, phase, makes="cpu", real=True)
        except _CallError as second:
            raise _failed(second.cause, made.module) from second.cause


def traced_with_dynamo(job: Job) -> tuple[OpGraph, DynamoRun]:
    """The graph of a job of one phase, and a run of the same call under Dynamo.

    Raises what tracing raises, RequestError for a job without a module, and DynamoError.
    """
    if job.is_graph or job.is_step:
        what = "a graph has no code left" if job.is_graph else "a step of your own is no module"
        raise RequestError(f"graph breaks: {what}; give the module, or a target")
    if job.request.mesh:
        raise RequestError("graph breaks with a mesh: give the module of one process")
    (phase,) = job.phases or ("forward",)
    if phase not in names.MEASURED:
        raise RequestError(f"graph breaks of phase {phase!r}: {one_of(phase, names.MEASURED)}")
    torch_private.DYNAMO_LATER.load()  # before the module's code asks for it
    with ExitStack() as stack:
        for context in (collector_paused(), overrides.apart(), torch.inference_mode(False)):
            stack.enter_context(context)
        if job.is_named:
            stack.enter_context(isolation.own_imports())
        made = loaded(job)
        graphs = trace_phases(made.module, made.inputs, (phase,), job.options, made.name)
        job.check_used(graphs)
        if not job.is_named:
            made = loaded(job)  # a trace may have changed its arguments
        return graphs[phase], run_dynamo(made, phase)


def check_enabled() -> None:
    """Raise RequestError where torch.compile is switched off in this process, or is too old."""

    parts = ("ConvertFrameAssert", "register_bytecode_hook", "FrameExecStrategy")
    if not all(map(torch_private.has, parts)):
        raise RequestError(
            f"graph breaks: torch {torch.__version__} has another Dynamo than what is read here; "
            "use torch 2.13"
        )
    if getattr(torch_private.dynamo_config, "disable", False):
        raise RequestError(
            "graph breaks: torch.compile is switched off (TORCHDYNAMO_DISABLE or "
            "torch._dynamo.config.disable); switch it on"
        )


def _plain(module: nn.Module) -> nn.Module:
    """The module inside of what torch.compile returned."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else module


def _run(
    module: nn.Module, inputs: Inputs, phase: str, makes: str, real: bool = False
) -> DynamoRun:
    """makes: the device on which code makes tensors that says none."""

    device = "cpu" if real else "meta"
    calls = ModuleCalls(module, inputs, device=device)
    watch = DynamoWatch(module, real=real)
    with kept(watch.functions.touched), _own_compile_off(module), watch.on():
        for tensor in tensors_in((inputs.args, inputs.kwargs, inputs.decode)):
            if not real:
                arguments.learn(watch.values, tensor)
        torch_private.counters.clear()
        training = phase == "training"
        call = calls.plain_call(phase)
        compiled: Any = torch_private.dynamo_optimize(watch.backend())(module)
        grad = torch.enable_grad() if training else torch.no_grad()
        step = ModuleCalls(compiled, inputs, device=makes)
        with grad, watch.functions.compiling(), watch.watching():
            try:
                step.call(call.args, call.kwargs)
            except Exception as error:
                raise _CallError(error) from error
        breaks = sum(torch_private.counters["graph_break"].values())
        return watch.run_of(breaks)


@contextlib.contextmanager
def _own_compile_off(module: nn.Module) -> Iterator[None]:
    """Inside, parts for which the user called `.compile()` are compiled with the whole."""
    before = [
        (part, part._compiled_call_impl)
        for part in module.modules()
        if getattr(part, "_compiled_call_impl", None) is not None
    ]
    try:
        for part, _ in before:
            part._compiled_call_impl = None
        yield
    finally:
        for part, compiled in before:
            part._compiled_call_impl = compiled


# -- on numbers ------------------------------------------------------------------------------------


class _CallError(Exception):
    """The call of a module raised an error."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class _TooLargeError(Exception):
    """A module that is too large to be run on numbers."""


def _with_numbers(module: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
    """A copy of a module and its inputs on the CPU, with small random numbers for unknown ones."""
    size = sum(t.nbytes for part in module.modules() for t in own_tensors(part))
    size += sum(t.nbytes for t in tensors_in((inputs.args, inputs.kwargs)))
    if size > MOST_REAL:
        raise _TooLargeError(
            f"it has {format_capacity(size)}, and is run on numbers up to "
            f"{format_capacity(MOST_REAL)}"
        )
    generator = torch.Generator().manual_seed(0)

    def filled(tensor: Tensor) -> Tensor:
        value = tensor.__dict__.get(REAL_VALUE)
        if value is not None:
            return value.clone()  # type: ignore[no-any-return]
        if tensor.device.type == "cpu":
            return tensor.detach().clone()
        made = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
            made.normal_(0.0, 0.02, generator=generator)
        return made

    with torch.device("cpu"), torch.no_grad(), torch_private.disable_current_modes():
        made = Loaded(_plain(module), inputs).filled(filled)
    return made.module, made.inputs


def _failed(error: Exception, module: nn.Module, more: str = "") -> DynamoError:
    """The error of a run: which module, which line, what to do."""
    frames = [frame for frame in getattr(error, "real_stack", None) or ()]
    line = lines.users_line([(frame.filename, frame.lineno or 0) for frame in frames])
    where = f"  {line}" if line else users_traceback(error)
    text = str(error).strip().partition("\n")[0]
    parts = [
        f"graph breaks of {type(module).__name__}: {type(error).__name__}: {text}",
        where,
        more,
        "Run torch.compile on the module itself to see the whole error.",
    ]
    return DynamoError("\n".join(part for part in parts if part))


# -- watching --------------------------------------------------------------------------------------
# The mode under which a module runs that Dynamo compiles: which op runs in which graph, and why.
#
# Dynamo asks for each function that runs whether to compile it.  Graphs run as they were captured,
# node after node, so that every op is seen; nothing is generated and nothing is timed.


_PLACE = re.compile(r'File "([^"]+)", line (\d+)')


class DynamoWatch(torch_private.TorchDispatchMode, Tape):
    """Runs code under Dynamo, and notes for each op the stretch that it runs in.

    On meta tensors values are followed as in a recording (see `recording`), so that code which asks
    for one goes the way that a recording goes.  real: run on numbers instead.
    """

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Dynamo compiles under no other modes than those of torch itself, as which this counts."""
        return True

    def __init__(self, root: nn.Module, values: Values | None = None, real: bool = False) -> None:
        torch_private.TorchDispatchMode.__init__(self)  # type: ignore[no-untyped-call]
        Tape.__init__(self, values or Values(), record=False)
        self.real = real
        self.functions = DynamoFunctions(root)
        self.stretches: list[placing.Stretch] = []
        self.ops: list[placing.RanOp] = []
        self.graphs = 0
        self._watching = False
        self._running: tuple[int, int] | None = None  # graph and stretch that run now
        self.running_node: fx.Node | None = None
        self._lines: dict[str, str] = {}
        self._runner = Runner(self, self.again)

    # -- ops ---------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch_private.CompileContext.current_compile_id() is not None:
            return func(*args, **kwargs)  # Dynamo runs it on fake tensors
        whole = isinstance(func, torch_private.HigherOrderOperator)
        if self._watching and not self.here.inside:
            self._note("higher_order" if whole else info_of(func).name)
        if whole or self.real:
            return func(*args, **kwargs)
        with torch_private.DisableTorchFunction():
            return self._runner.run(func, args, kwargs)

    def _note(self, name: str) -> None:
        if self._running is not None:
            node = self.running_node
            source = self._line_of(node) if node is not None else ""
            place = self._running[1]
        else:
            source = source_line(3)
            stretch = placing.Stretch(-1, *self.functions.why(sys._getframe(2)))
            if not self.stretches or self.stretches[-1] != stretch:
                self.stretches.append(stretch)
            place = len(self.stretches) - 1
        self.ops.append(placing.RanOp(name, source, place))

    def _line_of(self, node: fx.Node) -> str:
        stack = node.meta.get("stack_trace") or node.stack_trace or ""
        line = self._lines.get(stack)
        if line is None:
            places = [(name, int(number)) for name, number in _PLACE.findall(stack)]
            line = self._lines[stack] = lines.users_line(places)
        return line

    # -- compiling ---------------------------------------------------------------------------------

    def backend(self) -> Callable[..., Any]:
        """The backend for Dynamo's graphs: it runs each node after node."""

        def collect(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            number, self.graphs = self.graphs, self.graphs + 1
            interpreter = _Nodes(graph, self)

            def run(*args: Any) -> Any:
                if self._watching:
                    behind = self.functions.caller(sys._getframe(1))
                    why = self.functions.why(behind) if self.stretches else (-1, -1)
                    self.stretches.append(placing.Stretch(number, *why))
                before = self._running
                self._running = number, len(self.stretches) - 1
                try:
                    return interpreter.run(*args)
                finally:
                    self._running = before

            return run

        setattr(collect, OURS, True)
        return collect

    # -- the run -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, ops are noted."""
        self._watching = True
        try:
            yield
        finally:
            self._watching = False

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Inside, this mode is on in this thread."""
        overrides.push(self)
        try:
            yield
        finally:
            overrides.pop(self)
            self.tags.end()

    def run_of(self, graph_breaks: int, notes: Sequence[str] = ()) -> placing.DynamoRun:
        """The run as noted."""
        return placing.DynamoRun(
            causes=self.functions.told(),
            stretches=tuple(self.stretches),
            ops=tuple(self.ops),
            graphs=self.graphs,
            graph_breaks=graph_breaks,
            recompiled=tuple(self.functions.recompiled()),
            real=self.real,
            notes=tuple(notes),
        ).verify()


class _Nodes(fx.Interpreter):
    """Runs a graph node after node, and tells the watch which."""

    def __init__(self, graph: fx.GraphModule, watch: DynamoWatch) -> None:
        super().__init__(graph)
        self.watch = watch

    def run_node(self, n: fx.Node) -> Any:
        self.watch.running_node = n
        try:
            return super().run_node(n)
        finally:
            self.watch.running_node = None
