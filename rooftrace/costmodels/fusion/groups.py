"""A kernel of a graph: its ops, what to call it, and the joins that made it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rooftrace.costmodels.fusion.joins import JOINS, because
from rooftrace.costmodels.registry import find_rule
from rooftrace.costmodels.rewriting import marks
from rooftrace.tracer.graph import Op, OpGraph


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


# -- labels ----------------------------------------------------------------------------------------
# Names for groups of ops: what their rules say, and what a few ops are together.
#
# A group gets the label that a user's rule gives one of its ops, else the name of the first line of
# PATTERNS that fits.  Names are what reports show; they never change what is grouped or what it
# costs.


@dataclass(frozen=True, slots=True)
class Pattern:
    """Arithmetic written out op by op.

    name: what the report says.  has: at least one op of each of these sets is in the group; a
    member is the name of an op, or what the rules of several ops call them (`Rule.fused`).
    """

    name: str
    has: tuple[frozenset[str], ...]


def _any(*names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in names)


# No rule can say this: several elementary ops together make a norm or a rotation.
PATTERNS: tuple[str | Pattern, ...] = (
    "optimizer step",
    "cross entropy",
    "softmax",
    "softmax backward",
    "layer norm",
    "layer norm backward",
    "group norm",
    "batch norm",
    "batch norm backward",
    Pattern(
        "rms norm",
        (_any("pow", "square", "mul"), _any("mean"), _any("rsqrt", "sqrt", "reciprocal")),
    ),
    "rms norm",
    "rms norm backward",
    Pattern("rotary embedding", (_any("cat"), _any("mul"), _any("add"), _any("neg", "sub"))),
    Pattern("rotary table", (_any("cos"), _any("sin"))),
    Pattern("gated activation", (frozenset({"activation"}), _any("mul"))),
    "activation",
    "activation backward",
    "dropout",
    "embedding",
    "gather",
    "reduction",
    "concatenation",
    "cast",
)
"""What decides the name of a group, the first line first."""


def group_name(ops: Sequence[Op]) -> str:
    """The name of a group: of its op if there is one only, else of the first line that fits."""
    rules = [find_rule(op.target) for op in ops]
    if len(ops) == 1:
        label = rules[0].label if rules[0] else None
        library = ops[0].facts.get(marks.LIBRARY)
        if label and library:
            return label.replace("flash", str(library))
        return label or ops[0].name
    own = next((rule.label for rule in rules if rule and rule.is_own and rule.label), "")
    if own:
        return f"{own} (fused)"
    said = {rule.fused for rule in rules if rule and rule.fused}
    names = {op.name for op in ops}
    plain = said | names | {name[:-1] for name in names if name.endswith("_")}
    for pattern in PATTERNS:
        if isinstance(pattern, str):
            if pattern in said:
                return f"{pattern} (fused)"
        elif all(plain & wanted for wanted in pattern.has):
            return f"{pattern.name} (fused)"
    return "pointwise (fused)"
