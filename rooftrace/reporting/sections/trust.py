"""Report sections on the grounds of the numbers: coverage, assumptions, routing, and chip facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rooftrace._plain import Plain, Positive
from rooftrace.costmodels.estimates import Island, islands
from rooftrace.costmodels.kernels import Knobs
from rooftrace.graph import pattern_of
from rooftrace.hardware import Chip
from rooftrace.hardware.units import (
    few,
    format_bandwidth,
    format_count,
    format_flop_rate,
    format_intensity,
    format_share,
    format_traffic,
)
from rooftrace.reporting.renderers import units, view, words

if TYPE_CHECKING:
    from rooftrace.costmodels.estimates import Estimate
    from rooftrace.costmodels.fusion import Unsupported
    from rooftrace.graph import Op, OpGraph
    from rooftrace.reporting.sections.results import Results


# -- routing ---------------------------------------------------------------------------------------

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
"""The op of a router's choice where one kernel makes it."""


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
            continue  # the experts of all processes: another row has those of this one
        layers[(pattern_of(module), *(facts[name] for name in _FACTS))] += times
    for (module, *numbers), count in layers.items():
        fields = dict(zip(_FACTS.values(), numbers, strict=True))
        yield Routed(phase=phase, module=module, layers=count, **fields)


def _of_all(facts: Mapping[str, Any]) -> tuple[int, int, int]:
    """(rows of one process, experts that each chooses, experts of all processes)."""
    processes = facts["processes"]
    return facts["rows"] // processes, facts["chosen_each"], facts["classes"] * processes


def _choice(op: Op, graph: OpGraph) -> tuple[int, Mapping[str, Any]]:
    """The assumption on the choice that a forward op makes, and its facts; empty without one."""
    for number in op.assumptions if op.part == "forward" else ():
        made = graph.assumptions[number]
        is_routing = made.facts.keys() >= _FACTS.keys() - {"counted"}
        if op.name in (made.op, _KERNEL) and is_routing and made.facts["distinct"] > 0:
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


# -- trust -----------------------------------------------------------------------------------------

ASSUMPTIONS_SHOWN = 40
ISLANDS_SHOWN = 20


def _shown(rows: Sequence[Any], most: int) -> list[view.Part]:
    """A line on the rows that a page leaves out."""
    more = len(rows) - most
    return [view.Note(f"{more:,} more are in report.json.")] if more > 0 else []


# -- assumptions -----------------------------------------------------------------------------------


def assumptions(results: Results) -> view.Section:
    """Each assumption once, with the phases that make it and every place in starred form."""
    title = "Assumptions"
    merged: dict[tuple[str, str, str], tuple[dict[str, float], dict[str, None]]] = {}
    for phase, item in results.assumptions:
        key = (item.kind, item.text, "" if item.value is None else str(item.value))
        phases, places = merged.setdefault(key, ({}, {}))
        phases[phase] = phases.get(phase, 0.0) + results.resting_share(phase, item.id)
        places[units.MODULE.page(pattern_of(item.where))] = None
    if not merged:
        return view.Section(title=title, parts=[view.Note("None: nothing had to be assumed.")])
    heads = {
        "number": "#",
        "kind": "Kind",
        "phases": "Phases",
        "where": "Where",
        "text": "What was assumed",
        "value": "Value",
    }
    columns = [view.Column(key, units.TEXT, head) for key, head in heads.items()]
    columns.append(view.Column("share", units.WORDS, "Time resting on it"))
    rows = [
        {
            "number": number,
            "kind": kind,
            "phases": ", ".join(phases),
            "where": few(list(places)),
            "text": text,
            "value": value,
            "share": _shares(phases),
        }
        for number, ((kind, text, value), (phases, places)) in enumerate(merged.items(), 1)
    ]
    note = "Time resting on it: share of the step in kernels whose sizes or values came from it."
    table = view.Table(columns=columns, rows=rows[:ASSUMPTIONS_SHOWN])
    parts = [table, view.Note(note), *_shown(rows, ASSUMPTIONS_SHOWN)]
    return view.Section(title=title, parts=parts)


def _shares(phases: Mapping[str, float]) -> str:
    """ "71 %" of the phase, or by phase where they differ; a dash where no kernel rests on it."""
    shown = {phase: format_share(share) if share else "–" for phase, share in phases.items()}
    if len(set(shown.values())) == 1:
        return next(iter(shown.values()))
    return ", ".join(f"{phase} {share}" for phase, share in shown.items())


# -- islands ---------------------------------------------------------------------------------------


def islands_of(results: Results) -> view.Section:
    """Tensors that stay in another floating precision than the priced one."""
    merged: dict[tuple[str, str], dict[str, Island]] = {}
    for phase, graph in results.graphs.items():
        for island in islands(graph):
            merged.setdefault((island.where, island.precision), {})[phase] = island
    if not merged:
        return view.Section()
    columns = [
        view.Column("where", units.MODULE, "Where"),
        view.Column("precision", units.TEXT, "Precision"),
    ]
    columns += [view.Column(f"in {p}", units.WORDS, p) for p in results.graphs]
    rows = []
    for (where, precision), by_phase in merged.items():
        row: dict[str, Any] = {"where": where, "precision": precision}
        for phase in results.graphs:
            made = by_phase.get(phase)
            row[f"in {phase}"] = made and f"{format_traffic(made.bytes)} in {made.tensors:,}"
        rows.append(row)
    dtype = results.model.get("priced_dtype") or results.model.get("dtype")
    text = f"Priced in {dtype}; these tensors are explicitly in another precision and stay so."
    table = view.Table(columns=columns, rows=rows[:ISLANDS_SHOWN])
    parts = [view.Note(text), table, *_shown(rows, ISLANDS_SHOWN)]
    return view.Section(title="Islands of another precision", parts=parts)


# -- coverage --------------------------------------------------------------------------------------

COVERAGE = (
    view.Column("phase", units.TEXT, "Phase"),
    view.Column("execution", units.TEXT, "Execution"),
    view.Column("ops", units.COUNT, "Ops"),
    view.Column("ops_with_rule", units.COUNT, "With a rule"),
    view.Column("bytes_with_rule", units.WORDS, "Bytes with a rule"),
)
UNSUPPORTED = (
    view.Column("target", units.CODE, "Op"),
    view.Column("phase", units.TEXT, "Phase"),
    view.Column("where", units.TEXT, "Where"),
    view.Column("shapes", units.CODE, "Operands", left="both"),
    view.Column("count", units.COUNT, "Calls"),
    view.Column("bytes", units.BYTE, "Bytes"),
    view.Column("bytes_least", units.BYTE, "At least"),
    view.Column("most", units.BYTE, "At most"),
)


def coverage(results: Results) -> view.Section:
    """Ops and bytes with a rule, ops out of sight of the trace, and each op without a rule."""
    rows = []
    for phase, execution, estimate in results.of_first_chip():
        of = estimate.coverage
        share = format_share(of.bytes_with_rule_share)
        rows.append(
            {
                "phase": phase,
                "execution": execution,
                "ops": of.ops,
                "ops_with_rule": of.ops_with_rule,
                "bytes_with_rule": "100 %" if of.bytes == of.bytes_with_rule else share,
            }
        )
    parts: list[view.Part] = [view.Table(columns=COVERAGE, rows=rows)]
    if results.unrecorded:
        text = "Not everything was recorded: all totals are a lower bound."
        parts.append(view.Note(text, "strong"))
        texts = [f"{units.MODULE.page(gap.where)}: {gap.text}." for gap in results.unrecorded]
        parts += [view.Note(text, bullet=1) for text in dict.fromkeys(texts)]
    missing = results.unsupported_ops()
    if missing:
        parts += _without_a_rule(missing)
    return view.Section(title="Coverage", parts=parts)


def _without_a_rule(missing: Sequence[tuple[str, Unsupported]]) -> list[view.Part]:
    """The ops, the bounds of their bytes, and a rule for each to fill in."""
    keys = ("target", "shapes", "count", "bytes", "bytes_least", "most")
    rows = [
        {
            "phase": phase,
            "where": few([units.MODULE.page(module) for module in entry.modules]),
            **{key: getattr(entry, key) for key in keys},
        }
        for phase, entry in missing
    ]
    stubs = dict.fromkeys(entry.stub for _, entry in missing)
    code = "\n".join(["import rooftrace", *(f"\n\n{s}" for s in stubs)])
    return [
        view.Note(
            "Of these ops no FLOP is counted. Their bytes: operands are read and results written; "
            "of a cache or buffer that an op writes in place, as much as its other operands bring. "
            "The truth is between the bounds if no byte is touched twice."
        ),
        view.Table(columns=UNSUPPORTED, rows=rows),
        view.Note("To fill in, and to pass with `--rules FILE.py`:"),
        view.Note(code, code="python"),
    ]


# -- the same, in a few lines ----------------------------------------------------------------------


def trust(results: Results) -> view.Section:
    """Notes below the numbers of a screen: coverage, assumptions, guesses, floors and knobs."""
    estimates = [estimate for _, _, estimate in results.of_first_chip()]
    covered = (estimate.coverage for estimate in results.broken_down())
    complete, sentence = words.coverage_words(covered, results.unrecorded)
    assumed = words.assumption_words(assumption for _, assumption in results.assumptions)
    guesses = words.guess_words(results.chips[0])
    notes = [view.Note(f"coverage: {sentence}", "" if complete else "bad")]
    notes += [view.Note(line, "bad") for line in words.missing_rules(estimates)]
    notes += [view.Note(note) for note in dict.fromkeys(n for e in estimates for n in e.own_notes)]
    notes.append(view.Note(f"assumptions: {assumed}; guessed chip facts: {guesses}"))
    notes += [
        view.Note(line, "warn") for line in words.of_weights(a for _, a in results.assumptions)
    ]
    main = results.broken_down()
    resting = (f"{e.phase}, {e.execution.name}: {n}" for e in main for n in e.resting_notes)
    notes += [view.Note(line, "warn") for line in resting]
    if experts := routing_words(results):
        notes.append(view.Note(f"routing: {experts}"))
    notes += [
        view.Note(
            f"below the floor: {estimate.phase}, {estimate.execution.name} moves "
            f"{format_traffic(estimate.bytes_hbm)}; "
            f"{format_traffic(estimate.bytes_compulsory)} is the least",
            "warn",
        )
        for estimate in estimates
        if estimate.below_floor
    ]
    borrowed = {e.borrowed: isinstance(e.execution.knobs, Knobs) for e in estimates if e.borrowed}
    notes += [view.Note(text, "warn" if fitted else "") for text, fitted in borrowed.items()]
    notes.append(view.Note(grounds_of_times(estimates)))
    return view.Section(place=6, parts=notes)


def grounds_of_times(estimates: Sequence[Estimate]) -> str:
    """The grounds of the times of estimates, in a sentence or two."""
    by_knobs = dict.fromkeys(e.knobs.title for e in estimates if e.knobs is not None)
    texts = []
    if by_knobs:
        fitted = any(isinstance(e.execution.knobs, Knobs) for e in estimates)
        rest = "" if fitted else ", not calibrated"
        texts.append(f"expected by: {_titles(by_knobs)}{rest}")
        told = [e.interval_grounds for e in estimates if e.interval_grounds]
        texts.append(_interval_grounds(told))
    if not all(e.expected for e in estimates):
        names = dict.fromkeys(e.execution.name for e in estimates if not e.expected)
        of = f" of {', '.join(names)}" if by_knobs else ""
        texts.append(f"times{of} are bounds: peaks of the datasheet, which real kernels miss")
    return "; ".join(filter(None, texts))


def _titles(titles: Iterable[str]) -> str:
    """Titles of knobs; "typical kernels (eager)" and "typical kernels (compiled)" as one."""
    by_name: dict[str, list[str]] = {}
    for name, _, how in (title.removesuffix(")").partition(" (") for title in titles):
        by_name.setdefault(name, []).extend(filter(None, [how]))
    return ", ".join(f"{n} ({', '.join(how)})" if how else n for n, how in by_name.items())


def _interval_grounds(grounds: Sequence[str]) -> str:
    """The grounds of intervals: a sentence for one, for several how many are extrapolated."""
    if len(set(grounds)) < 2:
        return "".join(grounds[:1])
    far = sum("extrapolated" in text for text in grounds)
    return f"{far} of {len(grounds)} intervals extrapolated" if far else ""


# -- chips -----------------------------------------------------------------------------------------


def chips(results: Results) -> view.Section:
    """Every fact of every chip with its source, and where its roofs meet."""
    return view.Section(title="Chips", parts=[_chip(results, chip) for chip in results.chips])


def _chip(results: Results, chip: Chip) -> view.Section:
    heads = {"fact": "Fact", "text": "Value", "kind": "Kind", "source": "Source", "note": "Note"}
    columns = [view.Column(key, units.TEXT, head) for key, head in heads.items()]
    rows = [
        {"fact": name, **{key: getattr(fact, key) for key in heads if key != "fact"}}
        for name, fact in chip.facts()
    ]
    estimates = [results.estimate(phase, chip=chip.name) for phase in results.phases]
    used = sorted({(e.peak_precision, e.peak, e.ridge) for e in estimates})
    bandwidth = format_bandwidth(chip.memory_bandwidth.value)
    lines = [
        f"Bandwidth {bandwidth} and {format_flop_rate(peak)} {precision} meet at "
        f"{format_intensity(ridge)}."
        for precision, peak, ridge in used
    ]
    return view.Section(
        title=f"{chip.title} (`{chip.name}`)",
        parts=[view.Table(columns=columns, rows=rows), view.Note("\n".join(lines), lines=True)],
    )
