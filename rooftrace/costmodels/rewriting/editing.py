"""A graph while a pass rebuilds it, and the names of attention as one op."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rooftrace.tracer.arguments import Argument, Ref, refs
from rooftrace.tracer.graph import Op, OpGraph, Tensor

ATTENTION = "rooftrace.attention.default"
ATTENTION_BACKWARD = "rooftrace.attention_backward.default"
WRITTEN_OUT = "written_out"
"""Fact of an attention that calls no library's kernel, so that its tiles are not known."""


class Editor:
    """A graph being rebuilt: new values at the end, ops in a new list, renumbered at the end."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.values = list(graph.values)
        self.ops: list[Op] = []
        self._causal: dict[tuple[int, int], int] = {}

    def value(
        self,
        shape: tuple[int, ...],
        dtype: str,
        role: str,
        repeats: tuple[int, ...],
        name: str = "",
    ) -> int:
        """A new contiguous value."""
        index = len(self.values)
        stride = Tensor.contiguous(shape)
        self.values.append(
            Tensor(
                shape=shape,
                dtype=dtype,
                stride=stride,
                role=role,
                storage=index,
                name=name,
                repeats=repeats,
            )
        )
        return index

    def view(
        self, of: Ref, shape: tuple[int, ...], stride: tuple[int, ...], repeats: tuple[int, ...]
    ) -> int:
        """A value that has the bytes of another, contiguous or with these strides."""
        index, source = len(self.values), self.values[of.id]
        then = source.then if source.then and source.then.repeat in repeats else None
        if of.then is not None:
            then = replace(of.then, value=self.values[of.then.value].storage)
        self.values.append(
            replace(source, shape=shape, stride=stride, name="", repeats=repeats, then=then)
        )
        return index

    def emit(
        self,
        like: Op,
        target: str,
        arguments: Mapping[str, Argument],
        outputs: tuple[int, ...],
        kind: str = "kernel",
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """An op in the place of `like`: same module, part and family."""
        self.ops.append(
            replace(
                like,
                target=target,
                arguments=dict(arguments),
                inputs=tuple(refs(arguments)),
                outputs=outputs,
                kind=kind,
                facts=dict(facts or {}),
                flops_torch=None,
            )
        )

    def causal_mask(self, queries: int, length: int) -> int:
        """A constant bool[S, L], the same one for every attention of this size."""
        mask = self._causal.get((queries, length))
        if mask is None:
            mask = self._causal[queries, length] = self.value(
                (queries, length), "bool", "constants", (), f"causal_mask_{queries}x{length}"
            )
        return mask

    def turned(self, like: Op, item: Ref) -> Ref:
        """The [H, b, a] view of an [H, a, b] value."""
        source = self.values[item.id]
        (heads, a, b), (outer, rows, columns) = source.shape, source.stride
        out = self.view(item, (heads, b, a), (outer, columns, rows), like.repeats)
        turn = {"self": item, "dim0": 1, "dim1": 2}
        self.emit(like, "aten.transpose.int", turn, (out,), kind="view")
        return Ref(out)

    def done(self) -> OpGraph:
        """The new graph, verified."""
        ops = tuple(
            op if op.id == index else replace(op, id=index) for index, op in enumerate(self.ops)
        )
        return self.graph.replace(values=tuple(self.values), ops=ops).verify()


def operand(op: Op, name: str) -> Ref:
    """A tensor argument by schema name.  Raises ValueError where it is none."""
    item = op.arguments[name]
    if not isinstance(item, Ref):
        raise ValueError(f"op {op.id} ({op.target}): expected a tensor as {name!r}, got {item!r}")
    return item
