"""CUDA graphs: a capture notes the ops that run, a replay runs them again.

A real capture runs nothing; here it runs once, as everything does, and that is said.  A replay puts
the noted ops through the dispatcher again, so a recording that is on counts each of them, and frees
each result when a real one would.  What a launch of a whole graph saves on the host is not known
here: the ops are dispatched one by one.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map

from rooftrace.tracer.emulation.handles import made, methods, nothing
from rooftrace.tracer.emulation.refused import refusal
from rooftrace.tracer.emulation.state import Answers, Emulation
from rooftrace.tracer.patches import contexts
from rooftrace.tracer.tape import META_KEY, Recorded, Tape, records
from rooftrace.tracer.tensors import subclasses
from rooftrace.tracer.whole import shown

_pools = itertools.count(1)
_NO_GRAPH = "there is no graph of the driver's"


@dataclass(frozen=True)
class _Made:
    """A tensor that an op of the capture made: which op, and which of its results."""

    op: int
    result: int


@dataclass
class _Noted:
    """One op of a capture.

    origin: the module, the part of the step and the line, as the recording said them.  last:
    results of earlier ops that nothing reads after this one.  results: the static outputs.
    """

    function: Any
    args: Any
    kwargs: Any
    origin: records.Origin | None = None
    last: list[int] = field(default_factory=list)
    results: dict[int, Any] = field(default_factory=dict)  # weakly, what the capture made, by place


class _Capture(TorchDispatchMode):
    """Notes the ops that run, without keeping what they make alive.

    They are those that the recording notes: of ops that are shown under another name, what runs for
    them, and of wrappers of tensors the tensors inside.
    """

    supports_higher_order_operators = True
    runs_whole = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[_Noted] = []
        self._made: dict[int, tuple[Any, _Made]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and any(subclasses.is_wrapper(kind) for kind in types):
            return NotImplemented
        instead = shown.behind(func)
        if instead is not None:
            contexts.push(self)
            try:
                return instead(*args, **kwargs)
            finally:
                contexts.pop(self)
        arguments = tree_map(self._noted, args), tree_map(self._noted, kwargs)
        noted = _Noted(func, *arguments)
        before = {id(item) for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)}
        result = func(*args, **kwargs)
        noted.origin = _origin()
        number = len(self.ops)
        self.ops.append(noted)
        for place, item in enumerate(tree_leaves(result)):
            if isinstance(item, Tensor) and id(item) not in before:
                noted.results[place] = weakref.ref(item)
                self._made[id(item)] = noted.results[place], _Made(number, place)
        return result

    def _noted(self, item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        reference, origin = self._made.get(id(item), (lambda: None, item))
        return origin if reference() is item else item

    def settled(self) -> list[_Noted]:
        """The ops, each with the results that nothing reads afterwards."""
        last: dict[int, int] = {}
        for number, op in enumerate(self.ops):
            last[number] = number
            for item in tree_leaves((op.args, op.kwargs)):
                if isinstance(item, _Made):
                    last[item.op] = number
        for maker, reader in last.items():
            self.ops[reader].last.append(maker)
        self._made.clear()
        return self.ops


def _recording() -> Tape | None:
    """The innermost recording, if it gets the next op."""
    mode: Any = _get_current_dispatch_mode()
    tape = getattr(mode, "tape", mode)  # of a mode that follows another thread
    return tape if isinstance(tape, Tape) else None


def _origin() -> records.Origin | None:
    """Where the last op of the innermost recording comes from; None where there is none."""
    recording = _recording()
    last = None if recording is None else next(iter(reversed(recording.graph.nodes)), None)
    noted = None if last is None else last.meta.get(META_KEY)
    return noted.origin if isinstance(noted, Recorded) else None


@contextlib.contextmanager
def _from(origin: records.Origin | None) -> Iterator[None]:
    """Inside, what runs comes from where an op of the capture did."""
    recording = _recording()
    if recording is None or origin is None:
        yield
        return
    with recording.origins.all_from(origin):
        yield


def _run(ops: Sequence[_Noted]) -> None:
    """Run noted ops again; each result lives until its last reader has run."""
    alive: dict[int, list[Any]] = {}

    def argument(item: Any) -> Any:
        return alive[item.op][item.result] if isinstance(item, _Made) else item

    with torch.no_grad(), torch._C.DisableTorchFunction():
        for number, op in enumerate(ops):
            args, kwargs = tree_map(argument, op.args), tree_map(argument, op.kwargs)
            with _from(op.origin):
                alive[number] = tree_leaves(op.function(*args, **kwargs))
            del args, kwargs
            for maker in op.last:
                _written(ops[maker].results, alive.pop(maker))


def _written(static: Mapping[int, Any], results: Sequence[Any]) -> None:
    """A replay puts its results where the capture put them: who keeps those reads these."""
    recording = _recording()
    if recording is None:
        return
    for place, reference in static.items():
        kept = reference()
        if kept is not None:
            recording.stands_for(kept, results[place])


class _CUDAGraph:
    """Methods of `torch.cuda.CUDAGraph`, but for the one that makes it."""

    _here: Emulation
    _capture: _Capture | None
    _ops: list[_Noted] | None
    _pool: Any
    __init__ = instantiate = enable_debug_mode = nothing
    debug_dump = refusal("CUDAGraph.debug_dump", _NO_GRAPH)
    raw_cuda_graph = refusal("CUDAGraph.raw_cuda_graph", _NO_GRAPH)
    raw_cuda_graph_exec = refusal("CUDAGraph.raw_cuda_graph_exec", _NO_GRAPH)
    get_graph_data = refusal("CUDAGraph.get_graph_data", _NO_GRAPH)

    def capture_begin(self, pool: Any = None, *args: Any, **kwargs: Any) -> None:
        here = self._here
        here.tell("capture")
        here.assume(
            "graph captures",
            "code that a CUDA graph captures runs once while it is captured, and is counted",
        )
        if here.settings.get("capturing"):
            raise RuntimeError("another CUDA graph is being captured")
        self._pool = pool or self._pool
        self._capture = here.settings["capturing"] = _Capture()
        contexts.push(self._capture)

    def capture_end(self) -> None:
        if self._capture is None:
            raise RuntimeError("capture_end() without capture_begin()")
        capture, self._capture = self._capture, None
        self._here.settings.pop("capturing", None)
        contexts.pop(capture)
        self._ops = capture.settled()
        self._here.tell("captured")

    def replay(self) -> None:
        if self._ops is None:
            raise RuntimeError("replay() of a CUDA graph that has captured nothing")
        self._here.assume(
            "graph replays",
            "a replay of a CUDA graph is counted as its ops, each dispatched by itself",
        )
        self._here.tell("replay")
        _run(self._ops)
        self._here.tell("replayed")

    def reset(self) -> None:
        self._ops = None

    def pool(self) -> Any:
        return self._pool


def answers(here: Emulation) -> Iterator[Answers]:
    """The class of graphs, and functions that make some or ask for them."""

    def new(kind: Any, keep_graph: bool = False) -> Any:
        graph = made(kind, _CUDAGraph)
        graph._here, graph._pool = here, (0, next(_pools))
        graph._tracker = graph._capture = graph._ops = None
        return graph

    def make_graphed_callables(callables: Any, *args: Any, **kwargs: Any) -> Any:
        here.assume(
            "graphed callables",
            "make_graphed_callables returns the callables as they are: each op is dispatched by "
            "itself, and neither warm-up nor capture is counted",
        )
        return callables

    yield torch.cuda.CUDAGraph, {**methods(_CUDAGraph), "__new__": staticmethod(new)}
    yield (
        torch.cuda,
        {
            "make_graphed_callables": make_graphed_callables,
            "_cuda_isCurrentStreamCapturing": lambda: bool(here.settings.get("capturing")),
            "_graph_pool_handle": lambda: (0, next(_pools)),
        },
    )
