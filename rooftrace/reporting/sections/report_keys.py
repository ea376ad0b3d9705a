"""What the keys of report.json mean and where they are read: by phase, and of everything around it.

A key that is declared here is written, and known to report.schema.json.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.guiding import LEVERS
from rooftrace.reporting.sections.shapes import Anything, Choice, Key, Many, Named, Object
from rooftrace.reporting.view import units
from rooftrace.tracer.vocabulary import ROLES

if TYPE_CHECKING:
    from rooftrace.costmodels.estimating import Breakdown

SAVINGS = 10
"""How many savings of each kind report.json lists: those that save most time."""
TEXT, FLAG, COUNT, FLOP, BYTE = units.TEXT, units.FLAG, units.COUNT, units.FLOP, units.BYTE
SECOND, SHARE, RATE, FRACTION = units.SECOND, units.SHARE, units.RATE, units.FRACTION
INTENSITY, POSITIVE, AMOUNT = units.INTENSITY, units.POSITIVE, units.AMOUNT
REGIME = Choice(("compute", "hbm", "network", "launch"))


def _keys(shape: Any, *names: str) -> tuple[Key, ...]:
    """Keys of one shape whose names say what they are."""
    return tuple(Key(name, shape) for name in names)


# -- what a step costs -----------------------------------------------------------------------------

SUMS = (
    *_keys(COUNT, "calls"),
    *_keys(FLOP, "flops"),
    *_keys(BYTE, "bytes"),
    *_keys(SECOND, "t_comp", "t_hbm", "t_net"),
    Key("t_device", SECOND, "s, kernel gaps included"),
    Key("regime", REGIME),
    Key("share", SHARE, "of t_serial"),
)
ENTRY = Object("entry", SUMS, open=True)


def _named(entries: Breakdown, name: str) -> list[dict[str, Any]]:
    """Sums over kernels by something, which stands under `name` in place of "key"."""
    return [{name: key, **sums} for key, sums in _by_name(entries).items()]


def _by_name(entries: Breakdown) -> dict[str, dict[str, Any]]:
    """Sums over kernels by something, without "key"."""
    return {
        key: {name: value for name, value in entry.items() if name != "key"}
        for key, entry in entries.items()
    }


def _time(name: str, about: str = "s") -> Key:
    return Key(name, SECOND, about, of=lambda e: getattr(e.times, name))


TIMES = (
    Key("peak", RATE, "FLOP/s, dense, of the dominant matrix precision"),
    Key("ridge", INTENSITY, "FLOP/byte"),
    Key("flops_realizable", SHARE, "t_comp times peak"),
    *(_time(name) for name in ("t_comp", "t_hbm", "t_net")),
    _time("t_launch", "s: t_est - t_serial"),
    _time("t_bound", "s: a bound: datasheet rates, engines that overlap perfectly"),
    _time("t_serial", "s: sum over kernels; what it is says t_is"),
    _time("t_est", "s: end of the two-track queue; what it is says t_is"),
    Key(
        "t_is",
        Choice(("expected", "bound")),
        "what all times but t_bound are: expected, by knobs, or bounds, by datasheet rates",
        of=lambda e: "expected" if e.expected else "bound",
    ),
    Key(
        "knobs",
        TEXT,
        "title of the knobs that give the expected times; null for bounds",
        null=True,
        of=lambda e: e.knobs.title if e.knobs is not None else None,
    ),
    Key(
        "t_interval",
        Many(SECOND, 2),
        "s: 90 % of measured steps lie between; null for bounds",
        null=True,
        of=lambda e: e.t_interval or None,
    ),
    Key("regime", REGIME, of=lambda e: e.times.regime),
    Key(
        "regime_shares",
        Named(FRACTION),
        "share of t_est by regime",
        of=lambda e: e.times.regime_shares,
    ),
    Key("regime_next", REGIME, of=lambda e: e.times.next_regime),
    Key(
        "regime_margin",
        SHARE,
        "largest regime over the next; null where nothing else takes time",
        null=True,
        of=lambda e: e.times.margin,
    ),
    Key("mfu", SHARE, null=True),
    Key("hfu", SHARE, null=True),
    Key("items_per_s", RATE, null=True),
)

STEP = (
    Key("flops", FLOP, "FLOP, attention dense, without recomputation"),
    Key("flops_causal", FLOP, "FLOP that kernels knowing the mask compute"),
    *_keys(FLOP, "flops_recompute", "flops_matrix"),
    Key("macs", FLOP, "flops_matrix / 2"),
    Key("precision", TEXT, "the dominant matrix precision", of=lambda e: e.plan.precision),
    Key(
        "bytes",
        Object("", _keys(BYTE, *ROLES)),
        "byte through HBM by role; sums to bytes_hbm",
        of=lambda e: e.bytes.to_dict(),
    ),
    *_keys(BYTE, "bytes_hbm"),
    Key("bytes_net", BYTE, null=True),
    *_keys(BYTE, "bytes_compulsory"),
    *_keys(FLAG, "below_floor"),
    Key("ai_hbm", INTENSITY, "FLOP/byte", null=True),
    Key("ai_total", INTENSITY, null=True),
    *_keys(COUNT, "kernels"),
    *_keys(TEXT, "item"),
    *_keys(COUNT, "items"),
    Key("by_family", Named(ENTRY), of=lambda e: _by_name(e.by_family())),
    Key("by_part", Named(ENTRY), of=lambda e: _by_name(e.by_part())),
    Key(
        "by_module",
        Many(Object("", (Key("module", TEXT, "path with starred indices"), *SUMS), open=True)),
        of=lambda e: _named(e.by_pattern(), "module"),
    ),
    Key(
        "by_operator",
        Many(Object("", (*_keys(TEXT, "operator"), *SUMS), open=True)),
        of=lambda e: _named(e.by_operator(), "operator"),
    ),
    *TIMES,
)
PHASE = Object(
    "phase",
    (
        *(key.within(lambda by_chip: next(iter(by_chip.values()))) for key in STEP),
        Key(
            "chips",
            Named(Object("times", TIMES), 1),
            "the time fields on every chip",
            of=lambda by_chip: by_chip,
        ),
    ),
)

# -- what fusing saves -----------------------------------------------------------------------------

SAVING = Object(
    "saving",
    (
        Key("kind", TEXT, "fused, unread, or the kind of larger kernel"),
        *_keys(TEXT, "name"),
        Key("ops", Many(TEXT)),
        Key("module", TEXT, "module path with starred indices"),
        *_keys(TEXT, "part"),
        Key("count", POSITIVE, "kernels that stay, of all equal groups"),
        Key("launches", POSITIVE, "kernels that are not launched"),
        *_keys(BYTE, "bytes"),
        *_keys(SECOND, "seconds"),
        Key("share", SHARE, "seconds over t_est of the step without it"),
    ),
)
FUSED_STEP = Object(
    "",
    (
        *_keys(BYTE, "bytes_hbm"),
        *_keys(COUNT, "kernels"),
        Key("t_serial", SECOND, of=lambda e: e.times.t_serial),
        *_keys(SECOND, "t_est"),
    ),
)
HEADROOM = Object(
    "headroom",
    (
        Key("execution", TEXT, of=lambda h: h.after.execution.name),
        Key("before", FUSED_STEP, "every op a kernel"),
        Key("after", FUSED_STEP, "with the fusion groups"),
        Key("beyond", FUSED_STEP, "with larger kernels than those: a bound"),
        Key("fused", Many(SAVING), "those of most time", of=lambda h: h.fused[:SAVINGS]),
        Key("left", Many(SAVING), "those of most time", of=lambda h: h.left[:SAVINGS]),
    ),
)

# -- what would help -------------------------------------------------------------------------------

WHAT_IF = Object(
    "what_if",
    (
        Key("lever", Choice(LEVERS), "what is changed"),
        Key("action", TEXT, "what to do, a sentence"),
        Key("option", TEXT, "what asks rooftrace for the same; empty where nothing does"),
        Key("t_before", SECOND, "of the step without the change; bytes as rules count them"),
        Key("t_after", SECOND, "of the step with this change alone"),
        Key("gain", SECOND, "t_before - t_after"),
        Key("share", SHARE, "the gain over t_before"),
        Key("at_most", FLAG, "whether the gain is an upper bound"),
        Key("acts_on", REGIME, "the regime that loses most seconds"),
        Key("needs", TEXT, "what it assumes or costs"),
        Key("rests_on", TEXT, "what differs in FLOP, bytes and kernels"),
        Key("peak", BYTE, "alive at the peak of the step with the change"),
        Key("fits", FLAG, "whether that fits the first chip"),
    ),
)
GUIDANCE = Object(
    "guidance",
    (
        Key("execution", TEXT, of=lambda g: g.step.execution.name),
        Key("what_ifs", Many(WHAT_IF), "most seconds first", of=lambda g: g.options),
        Key(
            "together",
            WHAT_IF,
            "all that go together, priced as one; absent for fewer than two",
            optional=True,
        ),
    ),
)

# -- memory ----------------------------------------------------------------------------------------

BATCH = Object(
    "",
    (
        *_keys(COUNT, "batch"),
        *_keys(BYTE, "peak"),
        *_keys(FLAG, "weights_fit"),
        Key("open_ended", FLAG, "a larger one may fit"),
    ),
)
RESERVED = Object(
    "",
    (
        Key("allocated", BYTE, "in blocks, with workspaces at their most"),
        Key("allocated_least", BYTE, "without workspaces that a library may do without"),
        Key("reserved", BYTE, "in segments of PyTorch's caching allocator"),
        Key("reserved_expandable", BYTE, "the same with expandable_segments:True"),
        Key("workspaces", Named(BYTE), "the most at once, by what takes them"),
        *_keys(BYTE, "tensors", "context"),
    ),
)
ON_A_CHIP = Object(
    "",
    (
        Key("fits", FLAG, "the peak, and on a GPU the context of a process"),
        *_keys(COUNT, "chips_needed"),
        Key("reserved", RESERVED, "on a GPU, as the main execution runs; null: no GPU", null=True),
        Key(
            "max_batch",
            BATCH,
            "the largest batch that fits, and its peak in byte (of one sample for 0); "
            "null: not looked for",
            null=True,
        ),
    ),
)
TENSOR = Object(
    "",
    (
        *_keys(TEXT, "role"),
        Key("module", TEXT, "path with starred indices"),
        Key("op", TEXT, "what made it; empty: it was there before"),
        *_keys(TEXT, "part", "name"),
        Key("shape", Many(COUNT)),
        *_keys(TEXT, "dtype"),
        *_keys(FLAG, "saved"),
        *_keys(POSITIVE, "count"),
        Key("bytes", BYTE, "of all of them"),
    ),
)
BLOCK = Object(
    "",
    (
        *_keys(TEXT, "module"),
        *_keys(BYTE, "bytes"),
        *_keys(POSITIVE, "tensors"),
        Key("roles", Named(BYTE)),
    ),
)
MEMORY = Object(
    "memory",
    (
        *_keys(BYTE, "weights", "kv", "gradients", "optimizer", "activations_peak", "peak"),
        Key("at_peak", Named(BYTE), "byte by role at the peak; sums to it"),
        Key(
            "saved_at_peak",
            BYTE,
            "of the activations at the peak, those that forward made and backward reads",
        ),
        Key(
            "optimizer_temporaries_at_peak",
            BYTE,
            "of the temporaries at the peak, those that the optimizer makes and drops in its step",
        ),
        Key(
            "gathered_at_peak",
            BYTE,
            "of the weights at the peak, whole ones that were gathered from all processes",
        ),
        Key("buffers_at_peak", BYTE, "of the temporaries at the peak, what is sent and received"),
        Key("where", units.INDEX, "index of the op at the peak, in the graph that is run"),
        Key(
            "tensors",
            Many(TENSOR),
            "what the peak is made of, equal tensors together, the ten with most bytes",
        ),
        Key("modules", Many(BLOCK), "the peak by part of a layer, the ten with most bytes"),
        Key("fits", FLAG, "one of the first chip"),
        Key("chips", Named(ON_A_CHIP, 1)),
    ),
)


# -- how far to trust it ---------------------------------------------------------------------------

UNSUPPORTED = Object(
    "unsupported",
    (
        *_keys(TEXT, "phase", "target"),
        *_keys(COUNT, "count"),
        Key("bytes", BYTE, "byte: what the totals have"),
        Key("bytes_least", BYTE, "byte: results made anew, written"),
        Key("bytes_most", BYTE, "byte: every operand read, everything written in whole"),
        *_keys(TEXT, "shapes"),
        Key("modules", Many(TEXT)),
        *_keys(TEXT, "stub"),
    ),
)
COVERED = (*_keys(COUNT, "ops", "ops_with_rule"), Key("bytes_with_rule_share", FRACTION))
COVERAGE = Object(
    "",
    (
        *COVERED,
        Key("lower_bound", FLAG, "something ran out of sight of the trace"),
        Key("unsupported", Many(UNSUPPORTED)),
        Key("phases", Named(Named(Object("", COVERED)))),
    ),
)
ASSUMPTION = Object(
    "",
    (
        *_keys(TEXT, "phase"),
        *_keys(COUNT, "id"),
        *_keys(TEXT, "kind", "where", "text"),
        Key("value", Anything()),
        Key("op", TEXT, 'the op that needed it, "" where none did'),
        Key(
            "facts",
            Anything(),
            "of routing: how many rows choose how many of how many classes, and what that reaches",
            of=lambda a: a["facts"] or None,
            optional=True,
        ),
        Key(
            "time_share",
            FRACTION,
            "share of t_est in kernels that rest on it (main execution, first chip)",
        ),
    ),
)
ROUTING = Object(
    "",
    (
        *_keys(TEXT, "phase"),
        Key("module", TEXT, "the router's path with starred indices"),
        *_keys(POSITIVE, "layers"),
        Key("tokens", COUNT, "that choose in a layer"),
        Key("chosen", COUNT, "experts that a token chooses: k"),
        Key("experts", COUNT, "that it chooses among: E"),
        Key("distinct", AMOUNT, "expected number of experts that some token chooses"),
        Key("tokens_each", AMOUNT, "tokens of such an expert, on average"),
        Key("drawn", COUNT, "distinct experts in the draw that the code ran with"),
        Key("counted", AMOUNT, "distinct, or drawn where a loop of Python runs the experts"),
        Key("policy", TEXT, "as --assume routing= takes it"),
    ),
)
TOGETHER = Object(
    "",
    (
        *_keys(TEXT, "phase"),
        Key("mesh", TEXT, "sizes of the axes, and the chips"),
        Key("processes", POSITIVE, "that run the step together, a chip each"),
        Key("replicas", POSITIVE, "batches that they work on at a time", null=True),
        Key("system", TEXT, "how chips are joined; null: by the chip's own link", null=True),
        Key("t_est", SECOND),
        Key("items_per_s", RATE, "of all processes", null=True),
        Key("items_per_s_per_chip", RATE, null=True),
        Key("mfu", SHARE, null=True),
        Key("t_communication", SECOND, "of all exchanges, hidden ones too"),
        Key("t_exposed", SECOND, "for which computing waits"),
        Key("exposed_share", SHARE, "of t_est"),
        Key("limited_by", TEXT, "the largest share of the step; of a network, the axis"),
    ),
)
PIPELINE = Object(
    "",
    (
        *_keys(TEXT, "phase", "chip", "schedule"),
        *_keys(POSITIVE, "stages", "microbatches"),
        Key("seconds", SECOND, "of the step"),
        Key("bubble", SHARE, "of the step, in which processes wait for each other"),
        Key("imbalance", SHARE, "of the busiest process over the mean one, less 1"),
        Key("transfer", SECOND, "of one transfer between stages"),
        Key("items_per_s_per_chip", RATE, null=True),
        Key("mfu", SHARE, null=True),
        Key("peak", BYTE, "of the process that holds most"),
        Key("fits", FLAG, "whether each chip holds its process"),
    ),
)
EXCHANGED = Object(
    "",
    (
        *_keys(TEXT, "phase", "chip"),
        Key("axis", TEXT, "of the mesh; the name of the group where no mesh is known"),
        Key("kind", TEXT, "of the collective"),
        Key("ranks", POSITIVE, "processes of a group"),
        Key("level", TEXT, "the outermost level of links"),
        *_keys(POSITIVE, "calls"),
        Key("bytes", BYTE, "of whole buffers, as nccl-tests counts them"),
        Key("bytes_sent", AMOUNT, "byte, by one process over its links"),
        Key("seconds", SECOND, "of all calls"),
        Key("exposed", SECOND, "for which computing waits"),
        Key("beyond", TEXT, "what lies outside of measurements"),
    ),
)
ISLAND = Object(
    "",
    (
        *_keys(TEXT, "phase", "precision"),
        Key("where", TEXT, "module path with starred indices"),
        *_keys(POSITIVE, "tensors"),
        *_keys(BYTE, "bytes"),
    ),
)


# -- chips, the model, what was added ------------------------------------------------------------

FACT = Object(
    "fact",
    (
        Key("value", units.AMOUNT),
        *_keys(TEXT, "text", "source"),
        Key("kind", Choice(("datasheet", "measured", "derived", "guess"))),
    ),
    open=True,
)
CHIP = Object(
    "chip",
    (
        *_keys(TEXT, "name", "title", "vendor"),
        Key("peaks", Many(Anything(("engine", "precision", "rate")))),
        *_keys(FACT, "memory_capacity", "memory_bandwidth"),
    ),
    open=True,
)
OF_A_MODEL = ("name", "params", "params_trainable")
MODEL = Object(
    "",
    (Key("name", TEXT, null=True), *(Key(key, COUNT, null=True) for key in OF_A_MODEL[1:])),
    open=True,
)
OF_A_WORKLOAD = ("batch", "seq", "kv", "dtype", "optimizer")
WORKLOAD = Object(
    "",
    (*_keys(Anything(), *OF_A_WORKLOAD), Key("phases", Named(Named(Anything())))),
    open=True,
)
EXECUTION = Anything(("name", "attention", "fusion", "dispatch", "summary"))
SECTION = Object(
    "section",
    (
        *_keys(TEXT, "title"),
        Key(
            "tables",
            Named(
                Object(
                    "",
                    (
                        Key("units", Named(TEXT), "by column; empty where the values have none"),
                        Key("rows", Many(Named(Anything()))),
                    ),
                )
            ),
        ),
        Key("notes", Many(TEXT)),
    ),
)
NOTE = Object("", _keys(TEXT, "phase", "execution", "text"))
