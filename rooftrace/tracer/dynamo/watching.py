"""The mode under which a module runs that Dynamo compiles: which op runs in which graph, and why.

Dynamo asks for each function that runs whether to compile it.  Graphs run as they were captured,
node after node, so that every op is seen; nothing is generated and nothing is timed.
"""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from rooftrace.tracer.dynamo import records
from rooftrace.tracer.dynamo.reasons import guard_words, hints_of, plain_reason
from rooftrace.tracer.dynamo.state import OURS, Touched
from rooftrace.tracer.ops import info_of
from rooftrace.tracer.patches import contexts, original_of, replaced
from rooftrace.tracer.paths import pattern_of
from rooftrace.tracer.recording import Runner
from rooftrace.tracer.source import source_line, users_line
from rooftrace.tracer.tape import Tape
from rooftrace.tracer.tensors import owners
from rooftrace.tracer.values import Values

_RESUMED = "torch_dynamo_resume_in_"
_PLACE = re.compile(r'File "([^"]+)", line (\d+)')


@dataclass(slots=True)
class _Function:
    """One function that Dynamo was asked to compile, for one kind of caller."""

    code: CodeType
    path: str  # of the module whose method it is; "" for none
    breaks: list[Any] = field(default_factory=list)  # reasons for which graphs of it ended
    cause: int = -1  # why it does not run to its end in one graph


class Watch(TorchDispatchMode, Tape):
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
        self.touched = Touched()
        self.causes: list[records.Cause] = []
        self.stretches: list[records.Stretch] = []
        self.ops: list[records.RanOp] = []
        self.functions: list[_Function] = []
        self.graphs = 0
        self._watching = False
        self._paths = {id(module): owners.shown_path(path) for path, module in root.named_modules()}
        self._compiling: list[_Function] = []
        self._generated: dict[CodeType, _Function] = {}
        self._skipped: dict[CodeType, int] = {}
        self._running: tuple[int, int] | None = None  # graph and stretch that run now
        self._node: fx.Node | None = None
        # By cause, and how deep below a function it is: the last frame of it, and how many.
        self._happened: dict[tuple[int, int], tuple[Any, int]] = {}
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
            source = self._line_of(self._node) if self._node is not None else ""
            place = self._running[1]
        else:
            source = source_line(3)
            stretch = records.Stretch(-1, *self._why(sys._getframe(2)))
            if not self.stretches or self.stretches[-1] != stretch:
                self.stretches.append(stretch)
            place = len(self.stretches) - 1
        self.ops.append(records.RanOp(name, source, place))

    def _line_of(self, node: fx.Node) -> str:
        stack = node.meta.get("stack_trace") or node.stack_trace or ""
        line = self._lines.get(stack)
        if line is None:
            places = [(name, int(number)) for name, number in _PLACE.findall(stack)]
            line = self._lines[stack] = users_line(places)
        return line

    def _why(self, frame: Any) -> tuple[int, int]:
        """The cause of what runs in a frame: of the innermost function that is cut or skipped.

        Of a function that is compiled too often, also why it is compiled on its own; else -1.
        """
        limit = -1
        while frame is not None:
            function = self._generated.get(frame.f_code)
            cause = self._skipped.get(frame.f_code, -1) if function is None else function.cause
            if cause >= 0 and cause != limit:
                self._happens(cause, _SKIPPED if function is None else _depth(function), frame)
                if self.causes[cause].kind != records.LIMIT or limit >= 0:
                    return (cause, -1) if limit < 0 else (limit, cause)
                limit = cause
            frame = frame.f_back
        return limit, -1

    def _happens(self, cause: int, depth: int, frame: Any) -> None:
        """Count a cause, once for each run of a function that is cut or skipped."""
        last, times = self._happened.get((cause, depth), (None, 0))
        if last is not frame:
            self._happened[cause, depth] = frame, times + 1

    def _times(self, cause: int) -> int:
        """How often a cause cut the function next to it, or else had one skipped."""
        depths = sorted(depth for other, depth in self._happened if other == cause)
        return self._happened[cause, depths[0]][1] if depths else 1

    # -- compiling ---------------------------------------------------------------------------------

    def backend(self) -> Callable[..., Any]:
        """What Dynamo hands its graphs to: each is run node after node."""

        def collect(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            number, self.graphs = self.graphs, self.graphs + 1
            interpreter = _Nodes(graph, self)

            def run(*args: Any) -> Any:
                if self._watching:
                    own = sys._getframe(1)
                    while own is not None and own.f_code not in self._generated:
                        own = own.f_back
                    begins = None if own is None else own.f_back
                    why = self._why(begins) if self.stretches else (-1, -1)
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

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Inside, functions that Dynamo is asked to compile in this thread are noted."""
        from torch._dynamo import convert_frame
        from torch._dynamo.utils import graph_break_reasons

        home = convert_frame.ConvertFrameAssert
        convert = original_of(home, "__call__")

        def noted(
            own: Any, frame: Any, entry: Any, hooks: Any, sizes: Any, *args: Any, **kwargs: Any
        ) -> Any:
            self.touched.note(frame.f_code, sizes)
            function = _Function(frame.f_code, self._path_of(frame))
            known = len(graph_break_reasons)
            self._compiling.append(function)
            try:
                return convert(own, frame, entry, hooks, sizes, *args, **kwargs)
            except torch._dynamo.exc.Unsupported as error:
                self._skipped[frame.f_code] = self._skip(function, error)
                raise
            finally:
                self._compiling.pop()
                function.breaks = graph_break_reasons[known:]
                self._cut(function)
                self.functions.append(function)

        def made(code: CodeType, generated: CodeType) -> None:
            if self._compiling:
                self._generated[generated] = self._compiling[-1]

        hook = convert_frame.register_bytecode_hook(made)
        try:
            with (
                replaced(home, {"__call__": noted}),
                replaced(torch._dynamo.utils, {"run_node": _run_on_fakes}),
            ):
                yield
        finally:
            hook.remove()

    def _path_of(self, frame: Any) -> str:
        """The path of the module whose method a frame runs; "" for none."""
        code = frame.f_code
        first = code.co_varnames[0] if code.co_argcount else ""
        own = frame.f_locals.get("self", frame.f_locals.get(first))
        return self._paths.get(id(own), "")

    def _cut(self, function: _Function) -> None:
        """Note why the graph of a function ends before the function does."""
        if function.breaks:
            reason = function.breaks[-1]
            path = function.path if _is_direct(function) else ""
            function.cause = self._cause(records.BREAK, reason.reason, reason.user_stack, path)

    def _skip(self, function: _Function, error: Any) -> int:
        """Note why a function is not compiled."""
        text = str(error)
        code = function.code
        stack = list(getattr(error, "real_stack", None) or ())
        limit = "recompile limit" in text.partition("\n")[0]
        if limit or not stack:
            stack = [traceback.FrameSummary(code.co_filename, code.co_firstlineno, code.co_name)]
        kind = records.LIMIT if limit else records.SKIP
        return self._cause(kind, text, stack, function.path if len(stack) == 1 else "")

    def _cause(self, kind: str, text: str, stack: Sequence[Any], path: str) -> int:
        source = users_line([(frame.filename, frame.lineno or 0) for frame in stack])
        if not source and stack:  # in code of torch
            source = f"{stack[-1].filename}:{stack[-1].lineno}"
        made = records.Cause(
            kind, plain_reason(text), source, pattern_of(path), text.strip(), hints_of(text)
        )
        for place, known in enumerate(self.causes):
            if known.key == made.key:
                stronger = made.kind == records.BREAK != known.kind
                kept = replace(known, kind=made.kind) if stronger else known
                self.causes[place] = replace(kept, module=kept.module or made.module)
                return place
        self.causes.append(made)
        return len(self.causes) - 1

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
            self._happened.clear()

    def run_of(self, graph_breaks: int, notes: Sequence[str] = ()) -> records.DynamoRun:
        """What was noted."""
        causes = [
            replace(cause, times=self._times(place)) for place, cause in enumerate(self.causes)
        ]
        return records.DynamoRun(
            causes=tuple(causes),
            stretches=tuple(self.stretches),
            ops=tuple(self.ops),
            graphs=self.graphs,
            graph_breaks=graph_breaks,
            recompiled=tuple(self._recompiled()),
            real=self.real,
            notes=tuple(notes),
        ).verify()

    def _recompiled(self) -> Iterator[records.Recompiled]:
        from torch._dynamo.utils import guard_failures

        counts = Counter(function.code for function in self._generated.values())
        for code, times in counts.items():
            if times > 1 and not code.co_name.startswith(_RESUMED):
                reasons = [str(reason) for reason in guard_failures.get(code, ())]
                source = users_line([(code.co_filename, code.co_firstlineno)])
                reason = guard_words(reasons[-1]) if reasons else ""
                yield records.Recompiled(source, code.co_name, times, reason)


def _run_on_fakes(*args: Any, **kwargs: Any) -> Any:
    """What Dynamo runs a node of its graph by; the result is of fake tensors.

    Torch makes a fake tensor of what `torch.tensor` makes on the CPU, and forgets it on meta.
    """
    result = original_of(torch._dynamo.utils, "run_node")(*args, **kwargs)
    mode = contexts.fake_mode()
    if mode is None:
        return result

    def faked(tensor: Tensor) -> Any:
        return mode.from_tensor(tensor) if type(tensor) is Tensor and tensor.is_meta else tensor

    return tree_map_only(Tensor, faked, result)


_SKIPPED = 1 << 20
"""Stands for the depth of what has a whole function skipped."""


def _depth(function: _Function) -> int:
    """How deep in calls of a function its break is: 1 in its own lines."""
    return len(function.breaks[-1].user_stack) if function.breaks else _SKIPPED


def _is_direct(function: _Function) -> bool:
    """Whether it is the function itself that breaks, and none that it calls."""
    return _depth(function) == 1


class _Nodes(fx.Interpreter):
    """Runs a graph node after node, and tells the watch which."""

    def __init__(self, graph: fx.GraphModule, watch: Watch) -> None:
        super().__init__(graph)
        self.watch = watch

    def run_node(self, n: fx.Node) -> Any:
        self.watch._node = n
        try:
            return super().run_node(n)
        finally:
            self.watch._node = None
