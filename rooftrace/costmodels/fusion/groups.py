"""A kernel of a graph: its ops, what to call it, and the joins that made it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rooftrace.costmodels.fusion.joins import JOINS, because
from rooftrace.costmodels.fusion.labels import group_name
from rooftrace.costmodels.registry import find_rule
from rooftrace.tracer.graph import OpGraph


@dataclass(frozen=True, slots=True)
class Merge:
    """One step by which a kernel grew."""

    join: str  # the name of the join
    ops: tuple[int, ...]  # which came to the kernel by it


@dataclass(frozen=True, slots=True)
class Apart:
    """A kernel that stays apart from another one, though the condition of a user's join fits."""

    join: str  # the name of the join
    ops: tuple[int, ...]  # of the other kernels that it takes
    reason: str  # what keeps them apart
    is_first: bool  # whether this kernel is the first of them: each stands once as the first


@dataclass(frozen=True, slots=True)
class FusionGroup:
    """One kernel.

    A kernel that joins the end of an iteration to the start of the next is in the list twice: once
    for the first iteration, and once for all others.
    """

    ops: tuple[int, ...]  # numbers of its ops, in execution order
    pattern: str  # the name of a fused group, "op" for a single one
    name: str  # the same, or the name of the single op
    known: bool = True  # whether every op has a rule
    times: int = 1  # how many kernels it stands for: those of its first op
    repeats: tuple[int, ...] = ()  # in whose iterations it is launched
    merges: tuple[Merge, ...] = ()  # the steps by which it grew from one op
    apart: tuple[Apart, ...] = ()  # where a join of a user fits and cannot be made

    @staticmethod
    def of(
        graph: OpGraph,
        members: Iterable[int],
        repeats: tuple[int, ...] | None = None,
        merges: Sequence[Merge] = (),
    ) -> FusionGroup:
        """The kernel of these ops, under the name that their rules give it.

        repeats: in whose iterations it is launched; None: in those of its first op.
        """
        numbers = sorted(members)
        ops = [graph.ops[number] for number in numbers]
        name = group_name(ops)
        return FusionGroup(
            ops=tuple(numbers),
            pattern=name if len(ops) > 1 else "op",
            name=name,
            known=all(find_rule(op.target) is not None for op in ops),
            times=graph.times(ops[0]),
            repeats=ops[0].repeats if repeats is None else repeats,
            merges=tuple(merges),
        )

    @property
    def joins(self) -> tuple[str, ...]:
        """The names of the joins that made it, each once."""
        return tuple(dict.fromkeys(merge.join for merge in self.merges))

    @property
    def own_joins(self) -> tuple[str, ...]:
        """The names of those that a user or a third-party package registered."""
        return tuple(name for name in self.joins if all(join.name != name for join in JOINS))

    def why(self, graph: OpGraph) -> str:
        """Why these ops are one kernel: a line for each step by which it grew.

        Below are the kernels that a join of a user fits, and what keeps them apart.
        """
        lines = [
            f"{_named(graph, merge.ops)}: {merge.join}: {because(merge.join)}"
            for merge in self.merges
        ]
        if not lines:
            lines = ["one op, joined by nothing" if len(self.ops) == 1 else "not said"]
        lines += [
            f"{_named(graph, other.ops)}: stays apart, though {other.join} fits: {other.reason}"
            for other in self.apart
        ]
        return "\n".join(lines)


def _named(graph: OpGraph, ops: tuple[int, ...]) -> str:
    return ", ".join(f"{graph.ops[op].name} (op {op})" for op in ops)
