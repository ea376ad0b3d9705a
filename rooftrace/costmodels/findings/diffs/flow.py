"""The dataflow between the kernels of a graph: views, which move nothing, are looked through."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rooftrace.costmodels.fusion import runs
from rooftrace.costmodels.registry import find_rule
from rooftrace.tracer.arguments import references
from rooftrace.tracer.graph import Op, OpGraph, Tensor

Signature = tuple[tuple[str, tuple[int, ...]], ...]
"""Precision and shape of some tensors."""


@dataclass(frozen=True, slots=True)
class Read:
    """One tensor that a kernel reads.

    origin: the kernel that made it, or -1 - v for value v, which is there before the step.  value:
    the tensor as the kernel sees it, after any views.
    """

    origin: int
    value: int


class Flow:
    """The kernels of a graph in order, what each reads, and who reads what it makes."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.kernels = tuple(op.id for op in graph.kernels())

    @cached_property
    def origins(self) -> Sequence[int]:
        """By value, the kernel that made it, or -1 - v for what is there before the step."""
        origins = [-1 - value for value in range(len(self.graph.values))]
        for op in self.graph.ops:
            is_kernel = op.kind == "kernel"
            for value in op.outputs:
                if is_kernel:
                    origins[value] = op.id
                elif op.inputs:
                    origins[value] = origins[op.inputs[0]]
        return origins

    @cached_property
    def reads(self) -> Mapping[int, tuple[Read, ...]]:
        """By kernel, what it reads, in the order of its arguments."""
        reads: dict[int, tuple[Read, ...]] = {}
        for number in self.kernels:
            read = []
            for ref in references(self.graph.ops[number].arguments):
                read.append(Read(self.origins[ref.id], ref.id))
                if ref.then is not None:
                    read.append(Read(self.origins[ref.then.value], ref.then.value))
            reads[number] = tuple(read)
        return reads

    @cached_property
    def readers(self) -> Mapping[int, tuple[int, ...]]:
        """By kernel (or outside value, as in `Read.origin`), the kernels that read what it made."""
        readers: dict[int, dict[int, None]] = {}
        for number, read in self.reads.items():
            for each in read:
                readers.setdefault(each.origin, {})[number] = None
        return {origin: tuple(ops) for origin, ops in readers.items()}

    def signature(self, op: Op) -> tuple[Signature, Signature]:
        """Precisions and shapes of what an op reads and of what it makes.

        They are sorted where the order does not matter.  A list with an item for each iteration of
        a repeat has all of its items.
        """
        read: list[Tensor] = []
        for ref in op.reads:
            read += self._copies(op, ref.id, ref.every)
        made = [tensor for value in op.outputs for tensor in self._copies(op, value, True)]
        if in_any_order(op):
            return tuple(sorted(_sizes(read))), tuple(sorted(_sizes(made)))
        return _sizes(read), _sizes(made)

    def _copies(self, op: Op, value: int, every: bool) -> list[Tensor]:
        tensor = self.graph.values[value]
        return [tensor] * (runs.copies(self.graph, op, value) if every else 1)

    def exact(self, number: int) -> Hashable:
        """What two kernels have in common that do the same to tensors of the same sizes."""
        op = self.graph.ops[number]
        return op.name, op.part, self.signature(op)

    def loose(self, number: int) -> Hashable:
        """What two kernels have in common that do the same to tensors of any sizes."""
        op = self.graph.ops[number]
        return op.name, op.part

    def outside(self, origin: int, exact: bool) -> Hashable:
        """What two tensors have in common that are there before the step."""
        tensor = self.graph.values[-1 - origin]
        return (tensor.role, tensor.dtype, tensor.shape) if exact else tensor.role


def in_any_order(op: Op) -> bool:
    """Whether the cost of an op does not depend on the order of the tensors that it reads: it is
    pointwise, or takes a list of them."""
    rule = find_rule(op.target)
    if rule is not None and rule.fusion == "pointwise":
        return True
    return any(type(a) is tuple and any(references(a)) for a in op.arguments.values())


def _sizes(tensors: Sequence[Tensor]) -> Signature:
    return tuple((tensor.dtype, tensor.shape) for tensor in tensors)
