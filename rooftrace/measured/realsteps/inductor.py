"""What Inductor makes of a module: its kernels, and the ops of the program behind each of them.

Inductor calls a pass of the user's after it has fused the nodes of a graph, and notes which nodes
went into each kernel that it writes.  Both are settings of one `torch.compile`, so nothing changes
for anything else in the process.  Every node remembers the op that it was decomposed from, the
module that called it, and the number of its autograd node.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rooftrace.measured.alignment import keys
from rooftrace.measured.fused import compiled

_STEP = re.compile(r"[A-Za-z_]\w*|\d+")
_WRITTEN = "_inductor_triton_kernel_to_post_grad_node_info"
"""Where Inductor notes the nodes of each kernel, of any backend."""
_TOO_OLD = "this release of torch does not say what went into a kernel"
_NO_STEP = ("getattr", "_modules")


class Compilations:
    """Notes every graph that Inductor compiles under `options`.

    `torch.compile(module, options=compilations.options)` compiles as without them, but for a range
    of the profiler around each kernel on a CPU, and without caches of earlier compilations.
    """

    trouble: str
    """Why the kernels are not known; "" where they are."""

    def __init__(self) -> None:
        self.trouble = "" if hasattr(_debug(), _WRITTEN) else _TOO_OLD
        self._noted: list[_Noted] = []
        self._order: dict[str, int] = {}  # of the nodes of the last graph that Dynamo has made

    @property
    def options(self) -> dict[str, Any]:
        """Settings for `torch.compile(options=...)`: those that this release of torch has.

        None in a release that does not say what went into a kernel.
        """
        if self.trouble:
            return {}
        import torch._inductor.config as settings

        wanted = {
            "pre_grad_custom_pass": self._first_pass(),
            "_post_fusion_custom_pass": self._note,
            "trace.provenance_tracking_level": 1,
            "cpp.enable_kernel_profile": True,
            "fx_graph_cache": False,
        }
        known = settings.get_config_copy()
        return {name: value for name, value in wanted.items() if name in known}

    def _first_pass(self) -> Any:
        """What Inductor calls with a graph as Dynamo has made it, in the order of the program.

        Later passes move what is not trained.
        """
        from torch._inductor.custom_graph_pass import CustomGraphPass

        compilations = self

        class First(CustomGraphPass):
            def __call__(self, graph: Any) -> None:
                compilations._order = {node.name: at for at, node in enumerate(graph.nodes)}

            def uuid(self) -> str:
                return f"rooftrace {id(compilations)}"

        return First()

    def _note(self, scheduled: Any) -> Any:
        """Called by Inductor with the nodes of a graph in launch order, before it writes kernels.

        A release of torch may differ here: the step runs all the same, and `trouble` says why its
        kernels are not known.
        """
        try:
            self._keep(scheduled)
        except Exception as error:  # whatever another release raises
            self.trouble = f"{type(error).__name__}: {error}"
        return scheduled

    def _keep(self, scheduled: Any) -> None:
        """What Inductor will write comes into a mapping of its own: we keep this graph's part."""
        written = getattr(_debug(), _WRITTEN)
        if self._noted and self._noted[-1].written is written:
            self._noted[-1].until = len(written)
        origins = (
            origin
            for fused in scheduled
            for node in fused.get_nodes()
            if node.node is not None
            for origin in node.node.get_origins()
        )
        first = next(origins, None)
        nodes = [] if first is None else [_Node.of(node) for node in first.graph.nodes]
        self._noted.append(_Noted(nodes, written, len(written), self._order))

    def graphs(self) -> tuple[compiled.CompiledGraph, ...]:
        """The graphs compiled so far, in that order."""
        return tuple(noted.graph() for noted in self._noted)


def _debug() -> Any:
    from torch._inductor import debug

    return debug


@dataclass(frozen=True, slots=True)
class _Node:
    """A node of a graph after decomposition."""

    name: str
    target: str
    original: str  # the op that it was decomposed from; "" of a node that Inductor has added
    module: str
    backward: bool
    source: str  # the name of the call in Dynamo's graph; "" where it is not known
    call: tuple[Any, ...]  # equal for all nodes of one op

    @staticmethod
    def of(node: Any) -> _Node:
        meta = node.meta
        original, backward = meta.get("original_aten"), meta.get("partitioner_tag") == "is_backward"
        stack = meta.get("fwd_nn_module_stack" if backward else "nn_module_stack") or {}
        path = [entry[0] for entry in stack.values()][-1:]
        called: Sequence[Any] = () if backward else meta.get("from_node") or ()
        source = str(getattr(called[0], "name", "")) if called else ""
        plain = str(node.target) == str(original)  # not taken apart: an op of its own
        return _Node(
            name=node.name,
            target=str(node.target),
            original="" if original is None or node.op != "call_function" else str(original),
            module=_module(path[0]) if path else "",
            backward=backward,
            source=source,
            call=(backward, meta.get("seq_nr"), str(original), source, node.name if plain else ""),
        )


def _module(path: str) -> str:
    """ "layers.0.norm" of "L['self'].layers[0].norm", as Dynamo writes it in one way or another."""
    plain = re.sub(r"L\[['\"]\w+['\"]\]", "", path)
    return ".".join(step for step in _STEP.findall(plain) if step not in _NO_STEP)


@dataclass(slots=True)
class _Noted:
    """A graph that was compiled; what is written to `written` from `begin` on is of its kernels."""

    nodes: Sequence[_Node]
    written: Mapping[str, Sequence[str]]
    begin: int
    order: Mapping[str, int]
    until: int | None = None

    def graph(self) -> compiled.CompiledGraph:
        """The ops in the order of the program, and the kernels."""
        calls: dict[tuple[Any, ...], int] = {}
        ops: list[compiled.ProgramOp] = []
        op_of: dict[str, int] = {}  # by the name of the node
        place = {node.name: number for number, node in enumerate(self.nodes)}
        for node in self._in_order():
            if node.call not in calls:
                calls[node.call] = len(ops)
                ops.append(
                    compiled.ProgramOp(
                        compiled.call_name(node.original), node.module, node.backward
                    )
                )
            op_of[node.name] = calls[node.call]
        # What Inductor writes is in launch order.
        listed = list(self.written.items())[self.begin : self.until]
        kernels: list[compiled.CompiledKernel] = []
        for name, parts in listed:
            shown = compiled.call_name(name)
            if "::" in shown:  # a library's: what stands before it only fed it
                own = keys.common_name(shown)
                parts = sorted(
                    parts,
                    key=lambda part: (
                        part in op_of and keys.common_name(ops[op_of[part]].name) == own,
                        place.get(part, -1),
                    ),
                )[-1:]
            counts = Counter(op_of[part] for part in parts if part in op_of)
            kernels.append(compiled.CompiledKernel(shown, dict(counts)))
        return compiled.CompiledGraph(tuple(ops), tuple(kernels))

    def _in_order(self) -> list[_Node]:
        """The nodes of ops in the order of the program.

        One that is not in it stands behind its neighbour.  Graphs with a backward are in order.
        """
        keyed: list[tuple[int, int]] = []
        nodes = [node for node in self.nodes if node.original and "getitem" not in node.target]
        if any(node.backward for node in nodes):
            return nodes
        last = -1
        for number, node in enumerate(nodes):
            last = self.order.get(node.source, last)
            keyed.append((last, number))
        return [nodes[number] for _, number in sorted(keyed)]
