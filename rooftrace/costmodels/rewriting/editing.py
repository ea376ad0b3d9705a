"""A graph while a pass rebuilds it, and the names of attention as one op."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from rooftrace.tracer.arguments import Argument, Ref, refs
from rooftrace.tracer.asking import assumptions as asked
from rooftrace.tracer.graph import GraphError, Op, OpGraph, Tensor

Match = TypeVar("Match")

ATTENTION = "rooftrace.attention.default"
ATTENTION_BACKWARD = "rooftrace.attention_backward.default"
LATENT_ATTENTION = "rooftrace.latent_attention.default"
PACKED_ATTENTION = "rooftrace.packed_attention.default"
PACKED_LATENT_ATTENTION = "rooftrace.packed_latent_attention.default"


class Editor:
    """A graph being rebuilt: new values at the end, ops in a new list, renumbered at the end."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.values = list(graph.values)
        self.ops: list[Op] = []
        self.repeats = list(graph.repeats)
        self.replaced: dict[int, int] = {}
        """What comes from outside or leaves the step in place of another value."""
        self.moved: dict[int, int] = {}
        """Storages whose values lie in another one now."""
        self._masks: dict[str, int] = {}

    def rewrite(
        self,
        matches: Mapping[int, Match],
        emit: Callable[[Match], object],
        dropped: Container[int] = (),
    ) -> None:
        """The ops of the graph in order: what `emit` writes where one has a match, by its id, and
        the op itself elsewhere, unless it is dropped."""
        for op in self.graph.ops:
            if op.id in matches:
                emit(matches[op.id])
            elif op.id not in dropped:
                self.ops.append(op)

    def value(
        self,
        shape: tuple[int, ...],
        dtype: str,
        role: str,
        repeats: tuple[int, ...],
        name: str = "",
        stride: tuple[int, ...] | None = None,
    ) -> int:
        """A new value: contiguous, or with these strides."""
        index = len(self.values)
        stride = Tensor.contiguous(shape) if stride is None else stride
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

    def named_like(
        self, value: int, parts: Sequence[int], join: Callable[[list[str]], str]
    ) -> None:
        """Name a value in each iteration, where the parts that it is made of have names of their
        own."""
        for position, repeat in enumerate(self.repeats):
            if all(part in repeat.names for part in parts):
                columns = zip(*(repeat.names[part] for part in parts), strict=True)
                names = {**repeat.names, value: tuple(join(list(column)) for column in columns)}
                self.repeats[position] = replace(repeat, names=names)

    def kernel_for(self, op: Op) -> Op:
        """An op as the place of the kernel of a package, which is no fallback any more."""
        known = self.graph.assumptions
        rest = tuple(number for number in op.assumptions if known[number].kind != asked.FALLBACK)
        return replace(op, assumptions=rest)

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

    def viewed(
        self, like: Op, of: Ref, shape: tuple[int, ...], stride: tuple[int, ...] | None = None
    ) -> Ref:
        """A value in another shape: contiguous, or with these strides."""
        strides = Tensor.contiguous(shape) if stride is None else stride
        out = self.view(of, shape, strides, like.repeats)
        self.stands_for(like, of, out)
        return Ref(out)

    def stands_for(self, like: Op, of: Ref, value: int) -> None:
        """Let a value be another one in a shape of its own."""
        shape = self.values[value].shape
        self.emit(like, "aten.reshape.default", {"self": of, "shape": shape}, (value,), kind="view")

    def sliced(self, like: Op, of: Ref, dim: int, start: int, end: int) -> Ref:
        """Elements `start` to `end` of a value along one dimension; itself if that is all."""
        source = self.values[of.id]
        if (start, end) == (0, source.shape[dim]):
            return of
        shape = (*source.shape[:dim], end - start, *source.shape[dim + 1 :])
        out = self.view(of, shape, source.stride, like.repeats)
        cut: dict[str, Argument] = {"self": of, "dim": dim, "start": start, "end": end}
        self.emit(like, "aten.slice.Tensor", cut, (out,), kind="view")
        return Ref(out)

    def permuted(self, like: Op, of: Ref, dims: tuple[int, ...]) -> Ref:
        """A value with its dimensions in another order."""
        source = self.values[of.id]
        shape, stride = (tuple(t[d] for d in dims) for t in (source.shape, source.stride))
        out = self.view(of, shape, stride, like.repeats)
        self.emit(like, "aten.permute.default", {"self": of, "dims": dims}, (out,), kind="view")
        return Ref(out)

    def made(
        self,
        like: Op,
        target: str,
        arguments: Mapping[str, Argument],
        shape: tuple[int, ...],
        dtype: str,
        role: str = "activations",
        facts: Mapping[str, Any] | None = None,
    ) -> Ref:
        """The new value that a new kernel makes."""
        out = self.value(shape, dtype, role, like.repeats)
        self.emit(like, target, arguments, (out,), facts=facts)
        return Ref(out)

    def known_mask(self, name: str, *sizes: int) -> int:
        """A constant bool[S, L] of this name and sizes, the same for all attention of them."""
        named = f"{name}_mask_{'x'.join(map(str, sizes))}"
        if named not in self._masks:
            self._masks[named] = self.value(sizes[:2], "bool", "constants", (), named)
        return self._masks[named]

    def turned(self, like: Op, item: Ref) -> Ref:
        """The [H, b, a] view of an [H, a, b] value."""
        source = self.values[item.id]
        (heads, a, b), (outer, rows, columns) = source.shape, source.stride
        out = self.view(item, (heads, b, a), (outer, columns, rows), like.repeats)
        self.turns_into(like, item, out)
        return Ref(out)

    def turns_into(self, like: Op, item: Ref, value: int) -> None:
        """Let a value be another one with its dimensions 1 and 2 the other way round."""
        turn: dict[str, Argument] = {"self": item, "dim0": 1, "dim1": 2}
        self.emit(like, "aten.transpose.int", turn, (value,), kind="view")

    def done(self) -> OpGraph:
        """The new graph."""
        graph, other = self.graph, self.replaced
        moved = self.moved
        fields = {
            "values": tuple(
                replace(t, storage=moved[t.storage]) if t.storage in moved else t
                for t in self.values
            ),
            "repeats": tuple(self.repeats),
            "inputs": tuple(other.get(value, value) for value in graph.inputs),
            "outputs": tuple(other.get(value, value) for value in graph.outputs),
        }
        return graph.with_ops(self.ops, **fields)


def operand(op: Op, name: str) -> Ref:
    """A tensor argument by schema name.  Raises GraphError where it is none."""
    item = op.arguments.get(name)
    if not isinstance(item, Ref):
        raise GraphError(f"op {op.id} ({op.target}): expected a tensor as {name!r}, got {item!r}")
    return item
