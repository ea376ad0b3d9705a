"""The mode under which a module runs that Dynamo compiles: which op runs in which graph, and why.

Dynamo asks for each function that runs whether to compile it.  Graphs run as they were captured,
node after node, so that every op is seen; nothing is generated and nothing is timed.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from rooftrace.tracer.dynamo import records
from rooftrace.tracer.dynamo.functions import DynamoFunctions
from rooftrace.tracer.dynamo.state import OURS
from rooftrace.tracer.ops import info_of
from rooftrace.tracer.patches import contexts
from rooftrace.tracer.recording import Runner
from rooftrace.tracer.source import lines, source_line
from rooftrace.tracer.tape import Tape
from rooftrace.tracer.values import Values

_PLACE = re.compile(r'File "([^"]+)", line (\d+)')


class DynamoWatch(TorchDispatchMode, Tape):
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
        TorchDispatchMode.__init__(self)  # type: ignore[no-untyped-call]
        Tape.__init__(self, values or Values(), record=False)
        self.real = real
        self.functions = DynamoFunctions(root)
        self.stretches: list[records.Stretch] = []
        self.ops: list[records.RanOp] = []
        self.graphs = 0
        self._watching = False
        self._running: tuple[int, int] | None = None  # graph and stretch that run now
        self.running_node: fx.Node | None = None
        self._lines: dict[str, str] = {}
        self._runner = Runner(self, self.again)

    # -- ops ---------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._guards.CompileContext.current_compile_id() is not None:
            return func(*args, **kwargs)  # Dynamo runs it on fake tensors
        whole = isinstance(func, HigherOrderOperator)
        if self._watching and not self.here.inside:
            self._note("higher_order" if whole else info_of(func).name)
        if whole or self.real:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return self._runner.run(func, args, kwargs)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Switch the mode on inside; torch switches it off while it handles an op."""
        contexts.push(self)
        self.here.inside += 1
        try:
            yield
        finally:
            self.here.inside -= 1
            contexts.pop(self)

    def _note(self, name: str) -> None:
        if self._running is not None:
            node = self.running_node
            source = self._line_of(node) if node is not None else ""
            place = self._running[1]
        else:
            source = source_line(3)
            stretch = records.Stretch(-1, *self.functions.why(sys._getframe(2)))
            if not self.stretches or self.stretches[-1] != stretch:
                self.stretches.append(stretch)
            place = len(self.stretches) - 1
        self.ops.append(records.RanOp(name, source, place))

    def _line_of(self, node: fx.Node) -> str:
        stack = node.meta.get("stack_trace") or node.stack_trace or ""
        line = self._lines.get(stack)
        if line is None:
            places = [(name, int(number)) for name, number in _PLACE.findall(stack)]
            line = self._lines[stack] = lines.users_line(places)
        return line

    # -- compiling ---------------------------------------------------------------------------------

    def backend(self) -> Callable[..., Any]:
        """What Dynamo hands its graphs to: each is run node after node."""

        def collect(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            number, self.graphs = self.graphs, self.graphs + 1
            interpreter = _Nodes(graph, self)

            def run(*args: Any) -> Any:
                if self._watching:
                    behind = self.functions.caller(sys._getframe(1))
                    why = self.functions.why(behind) if self.stretches else (-1, -1)
                    self.stretches.append(records.Stretch(number, *why))
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
        contexts.push(self)
        try:
            yield
        finally:
            contexts.pop(self)
            self.tags.end()

    def run_of(self, graph_breaks: int, notes: Sequence[str] = ()) -> records.DynamoRun:
        """What was noted."""
        return records.DynamoRun(
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
