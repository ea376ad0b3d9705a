"""Experts: how many a layer reaches, and how many tokens each of those has, by the policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rooftrace._plain import Plain, Positive
from rooftrace.hardware.units import format_count
from rooftrace.reporting.view import model as view, units
from rooftrace.tracer.paths import pattern_of

if TYPE_CHECKING:
    from rooftrace.reporting.sections.results import Results
    from rooftrace.tracer.graph import Op, OpGraph

_FACTS = {
    "rows": "tokens",
    "chosen": "chosen",
    "classes": "experts",
    "distinct": "distinct",
    "drawn": "drawn",
    "policy": "policy",
    "counted": "counted",
}
"""The facts of an assumption on routing, and their names here."""
_KERNEL = "rooftrace.route_experts"
"""The op that stands for a router's choice where one kernel makes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed(Plain):
    """The choices of equal routers in one phase."""

    phase: str
    module: str  # path of the router, with starred indices
    layers: Positive  # how many choose so
    tokens: int  # that choose in a layer
    chosen: int  # experts that a token chooses
    experts: int  # that it chooses among
    distinct: float  # experts that some token is expected to choose: the active ones
    drawn: int  # that number in the draw that the code ran with
    counted: float  # that number in the bytes: the draw's, where a Python loop runs the experts
    policy: str  # as --assume routing= takes it

    KEYS = "phase module layers tokens chosen experts distinct tokens_each drawn counted policy"

    @property
    def tokens_each(self) -> float:
        """Tokens of an active expert, on average."""
        return self.tokens * self.chosen / self.distinct


def routed(results: Results) -> list[Routed]:
    """The routers of every phase, in the order in which they choose."""
    return [
        row for phase in results.phases for row in _of_graph(phase, results.estimate(phase).graph)
    ]


def _of_graph(phase: str, graph: OpGraph) -> Iterator[Routed]:
    grouped = {n for op in graph.ops if "groups_touched" in op.facts for n in op.assumptions}
    exact = {
        number
        for op in graph.ops
        for reached in [op.facts.get("groups_touched", op.facts.get("rows_touched"))]
        for number in op.assumptions
        if reached is not None and reached == graph.assumptions[number].facts.get("distinct")
    }
    last: dict[tuple[str, int], tuple[Mapping[str, Any], int]] = {}
    for op in graph.ops:
        number, facts = _choice(op, graph)
        if facts and (op.family == "moe" or grouped & set(op.assumptions)):
            # A router that chooses groups of experts first chooses among experts last.
            counted = facts["distinct" if number in exact else "drawn"]
            last[op.module, op.call] = {**facts, "counted": counted}, graph.times(op)
    spread = {_of_all(facts) for facts, _ in last.values() if "processes" in facts}
    layers: Counter[tuple[Any, ...]] = Counter()
    for (module, _), (facts, times) in last.items():
        if (facts["rows"], facts["chosen"], facts["classes"]) in spread:
            continue  # the experts of all processes: those of this one stand in a row of their own
        layers[(pattern_of(module), *(facts[name] for name in _FACTS))] += times
    for (module, *numbers), count in layers.items():
        fields = dict(zip(_FACTS.values(), numbers, strict=True))
        yield Routed(phase=phase, module=module, layers=count, **fields)


def _of_all(facts: Mapping[str, Any]) -> tuple[int, int, int]:
    """The rows of one process, what each chooses, and of how many in all processes."""
    processes = facts["processes"]
    return facts["rows"] // processes, facts["chosen_each"], facts["classes"] * processes


def _choice(op: Op, graph: OpGraph) -> tuple[int, Mapping[str, Any]]:
    """The assumption on the choice that a forward op makes, and its facts; empty without one."""
    for number in op.assumptions if op.part == "forward" else ():
        made = graph.assumptions[number]
        known = made.facts.keys() >= _FACTS.keys() - {"counted"}
        if op.name in (made.op, _KERNEL) and known and made.facts["distinct"] > 0:
            return number, made.facts
    return -1, {}


COLUMNS = (
    view.Column("phase", units.TEXT, "Phase"),
    view.Column("module", units.MODULE, "Router"),
    view.Column("layers", units.COUNT, "Layers"),
    view.Column("tokens", units.COUNT, "Tokens"),
    view.Column("chosen", units.COUNT, "Top-k"),
    view.Column("experts", units.COUNT, "Experts"),
    view.Column("distinct", units.NUMBER, "Distinct experts"),
    view.Column("tokens_each", units.NUMBER, "Tokens per active expert"),
    view.Column("drawn", units.COUNT, "In the draw"),
    view.Column("counted", units.NUMBER, "Counted"),
    view.Column("policy", units.TEXT, "Policy"),
)


def routing(results: Results) -> view.Section:
    """Distinct experts and tokens per active expert, for each kind of layer with experts."""
    rows = routed(results)
    if not rows:
        return view.Section()
    note = view.Note(
        "Scores are unknown, so a policy says which experts are chosen: `--assume "
        "routing=expected` (each equally likely), `balanced`, `uniform`, `skewed:EXPONENT` or "
        "`histogram:FILE`. Grouped products and gathers of weights count the distinct experts; a "
        "Python loop over experts counts those in the draw, a whole number, as it runs once for "
        "each."
    )
    return view.Section(title="Routing", parts=[view.Table(columns=COLUMNS, rows=rows), note])


def routing_words(results: Results) -> str:
    """A line for a screen: "decode 57.4 of 256 experts a layer, 1.11 tokens each (expected)"."""
    shown: dict[str, dict[str, None]] = {}
    for row in routed(results):
        text = (
            f"{format_count(row.distinct)} of {row.experts:,} experts a layer, "
            f"{format_count(row.tokens_each)} tokens each ({row.policy})"
        )
        if row.counted != row.distinct:
            text += f", of which a loop runs {row.counted:,.0f}"
        shown.setdefault(text, {})[row.phase] = None
    return "; ".join(f"{' and '.join(phases)} {text}" for text, phases in shown.items())
