"""Names for groups of ops: what their rules say, and what a few ops are together.

A group gets the label that a user's rule gives one of its ops, else the name of the first line of
PATTERNS that fits.  Names are what reports show; they never change what is grouped or what it
costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rooftrace.costmodels.registry import find_rule
from rooftrace.costmodels.rewriting import marks
from rooftrace.tracer.graph import Op


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
