"""CUDA graphs: a capture notes the ops that run, a replay runs them again.

A real capture runs nothing; here it runs once, as everything does, and that is said.  A replay puts
the noted ops through the dispatcher again, so a recording that is on counts each of them, and frees
each result when a real one would.  What a launch of a whole graph saves on the host is not known
here: the ops are dispatched one by one.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from rooftrace.tracer.emulation.here import Here
from rooftrace.tracer.emulation.refused import refusal
from rooftrace.tracer.emulation.streams import _made, _methods, _nothing
from rooftrace.tracer.patches import contexts

_pools = itertools.count(1)


@dataclass(frozen=True)
class _Made:
    """A tensor that an op of the capture made: which op, and which of its results."""

    op: int
    result: int


@dataclass
class _Noted:
    """One op of a capture.  last: results of earlier ops that nothing reads after this one."""

    function: Any
    args: Any
    kwargs: Any
    last: list[int] = field(default_factory=list)


class _Capture(TorchDispatchMode):
    """Notes the ops that run, without keeping what they make alive."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[_Noted] = []
        self._made: dict[int, tuple[Any, _Made]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        noted = _Noted(func, tree_map(self._noted, args), tree_map(self._noted, kwargs))
        before = {id(item) for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)}
        result = func(*args, **kwargs)
        number = len(self.ops)
        self.ops.append(noted)
        for place, item in enumerate(tree_leaves(result)):
            if isinstance(item, Tensor) and id(item) not in before:
                self._made[id(item)] = _reference(item), _Made(number, place)
        return result

    def _noted(self, item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        reference, made = self._made.get(id(item), (lambda: None, item))
        return made if reference() is item else item

    def settled(self) -> list[_Noted]:
        """The ops, each with the results that nothing reads afterwards."""
        last: dict[int, int] = {}
        for number, op in enumerate(self.ops):
            last[number] = number
            for item in tree_leaves((op.args, op.kwargs)):
                if isinstance(item, _Made):
                    last[item.op] = number
        for made, reader in last.items():
            self.ops[reader].last.append(made)
        self._made.clear()
        return self.ops


def _reference(tensor: Tensor) -> Any:
    return weakref.ref(tensor)


def _run(ops: Sequence[_Noted]) -> None:
    """Run noted ops again; each result lives until its last reader has run."""
    alive: dict[int, list[Any]] = {}

    def given(item: Any) -> Any:
        return alive[item.op][item.result] if isinstance(item, _Made) else item

    with torch.no_grad(), torch._C.DisableTorchFunction():
        for number, op in enumerate(ops):
            args, kwargs = tree_map(given, op.args), tree_map(given, op.kwargs)
            alive[number] = tree_leaves(op.function(*args, **kwargs))
            del args, kwargs
            for made in op.last:
                del alive[made]


def graph_methods(here: Here) -> dict[str, Any]:
    """Methods of `torch.cuda.CUDAGraph`."""

    def new(kind: Any, keep_graph: bool = False) -> Any:
        made = _made(kind, CUDAGraph)
        made._tracker, made._capture, made._ops, made._pool = None, None, None, (0, next(_pools))
        return made

    class CUDAGraph:
        __new__ = new
        __init__ = _nothing

        def capture_begin(self, pool: Any = None, *args: Any, **kwargs: Any) -> None:
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
            here.settings.pop("capturing", None)
            contexts.pop(capture)
            self._ops = capture.settled()

        def replay(self) -> None:
            if self._ops is None:
                raise RuntimeError("replay() of a CUDA graph that has captured nothing")
            here.assume(
                "graph replays",
                "a replay of a CUDA graph is counted as its ops, each dispatched by itself",
            )
            _run(self._ops)

        def reset(self) -> None:
            self._ops = None

        def pool(self) -> Any:
            return self._pool

        instantiate = enable_debug_mode = _nothing
        debug_dump = refusal("CUDAGraph.debug_dump", "there is no graph of the driver's")
        raw_cuda_graph = refusal("CUDAGraph.raw_cuda_graph", "there is no graph of the driver's")
        raw_cuda_graph_exec = refusal(
            "CUDAGraph.raw_cuda_graph_exec", "there is no graph of the driver's"
        )
        get_graph_data = refusal("CUDAGraph.get_graph_data", "there is no graph of the driver's")

    return _methods(CUDAGraph)


def functions(here: Here) -> dict[str, Any]:
    """Functions of torch.cuda.graphs."""

    def make_graphed_callables(callables: Any, *args: Any, **kwargs: Any) -> Any:
        here.assume(
            "graphed callables",
            "make_graphed_callables returns the callables as they are: each op is dispatched by "
            "itself, and neither warm-up nor capture is counted",
        )
        return callables

    return {
        "make_graphed_callables": make_graphed_callables,
        "_cuda_isCurrentStreamCapturing": lambda: bool(here.settings.get("capturing")),
        "_graph_pool_handle": lambda: (0, next(_pools)),
    }
