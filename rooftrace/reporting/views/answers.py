"""Views of answers about deployments, rates, lengths and chips, and of explorations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rooftrace.hardware.units import (
    format_bandwidth,
    format_capacity,
    format_flop_rate,
    format_intensity,
    format_time,
    plural,
)
from rooftrace.reporting.renderers import units, view, words
from rooftrace.reporting.views.folding import entry, grounds
from rooftrace.studies.explaining import decode_forms
from rooftrace.studies.solving import serving, workloads

_ROWS = 10
_FRONT = 8
_LIMITS = {
    "step": "time of a step", "tpot": "time per token", "ttft": "time to the first token",
    "memory": "memory",
}  # fmt: skip
_DOLLARS = units.Unit("dollar", "number", lambda value: "$" + _digits(value))
_JOULES = units.Unit("J", "number", lambda value: f"{_digits(value)} J")


def _digits(value: float) -> str:
    """A number with three digits: 0.200, 14.5, 1,430."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")


# -- deployments -----------------------------------------------------------------------------------


def serving_view(result: serving.ServingAnswer, output: view.Output) -> view.View:
    """The best deployment, its margin, the best of others, and the front of both speeds."""
    sections = [
        question_section(result.title, result.question),
        view.Section(title="Answer", parts=list(_answer(result)), place=2),
    ]
    if len(result.rows) > 1:
        rows = result.rows if output == "page" else result.rows[:_ROWS]
        parts: list[view.Part] = [_table(result, rows)]
        if len(rows) < len(result.rows):
            parts.append(view.Note(f"and {len(result.rows) - len(rows)} more", "faint"))
        sections.append(view.Section(title="The best of each configuration", parts=parts, place=3))
    if len(result.front) > 1:
        front = _spread(result.front, 24 if output == "page" else _FRONT)
        parts = [
            view.Note(
                f"{plural(len(result.front), 'candidate')} that no other beats in both tokens per "
                "second of a user and of a chip (limits aside):"
            ),
            _table(result, front, speeds=True),
        ]
        sections.append(view.Section(title="Trade-off", parts=parts, place=4))
    sections.append(grounds(result.rests, result.left_out, 5))
    return view.View(tuple(sections), result.title)


def question_section(title: str, question: str) -> view.Section:
    """The title of an answer, and its question as a sentence."""
    question = f"{question[:1].upper()}{question[1:]}"
    return view.Section(parts=[view.Note(title, "strong"), view.Note(question)], place=1)


def _answer(result: serving.ServingAnswer) -> Iterator[view.Note]:
    best = result.best
    if best is None:
        yield view.Note(f"no candidate meets the limits ({result.evaluated:,} evaluated)", "bad")
        nearest = result.nearest
        if nearest is not None:
            yield view.Note(f"nearest: {_deployed(nearest, result.name)}", "strong", bullet=1)
            for name, free in result.margins(nearest).items():
                if free < 0:
                    yield view.Note(f"{_LIMITS[name]} {_value(nearest, name)}, {-free:.1%} over "
                                    f"{_limit(result, nearest, name)}", bullet=1)  # fmt: skip
        return
    holds = "" if result.chance is None else f": {result.chance:.0%} chance to hold the limits"
    yield view.Note(f"{_deployed(best, result.name)}{holds}", "strong")
    for name, free in result.margins(best).items():
        chance = result.chances.get(name)
        left = f"{free:.1%} left" if chance is None else f"holds with a chance of {chance:.0%}"
        yield view.Note(
            f"{_LIMITS[name]} {_value(best, name)} of {_limit(result, best, name)}: {left}",
            bullet=1,
        )
    if result.chances:
        yield view.Note(best.estimate.interval_grounds, "faint", bullet=1)
    yield view.Note(", ".join(_worth(best, result)), bullet=1)
    yield from _edge(result, best)
    if result.second is not None:
        second = _deployed(result.second, result.name)
        worth = ", ".join(_worth(result.second, result))
        yield view.Note(f"second best: {second}; {worth}", bullet=1)


def _edge(result: serving.ServingAnswer, best: Any) -> Iterator[view.Note]:
    """The limits that the next size breaks, and the sizes between which the answer may lie."""
    size = best.sizes[result.name]
    if result.breaks and result.objective == "largest":
        broken = " and ".join(_LIMITS[name] for name in result.breaks)
        yield view.Note(f"{result.name} {size + 1:,} breaks: {broken}", bullet=1)
    elif size in result.sizes and size > 1:
        end = "largest" if size == result.sizes[1] else "smallest"
        yield view.Note(
            f"{result.name} {size:,} is the {end} that was looked at; --over {result.name}=1..N "
            "looks farther", "warn", bullet=1,
        )  # fmt: skip
    counts = {line.chips for line in result.curves}
    if len(counts) > 1 and best.chips == max(counts) and result.objective != "largest":
        yield view.Note(
            f"{best.chips:,} chips are the most that were looked at; --chips names others", "warn",
            bullet=1,
        )  # fmt: skip
    if result.span is not None and result.objective == "largest":
        safe, lucky = (
            f"{d.sizes[result.name]:,}" if d is not None else "none" for d in result.span
        )
        yield view.Note(
            f"if steps are as slow as the slowest 5 %, {result.name} {safe}; as fast as the "
            f"fastest 5 %, {lucky}", bullet=1,
        )  # fmt: skip


def _deployed(row: Any, name: str) -> str:
    """ "batch 64, kv 4,096 on 8 x h100-sxm (serving, bf16)"."""
    chips = f"{row.chips} x {row.chip}" if row.chips > 1 else row.chip
    sizes = [f"{name} {row.sizes[name]:,}"]
    sizes += [f"{other} {size:,}" for other, size in row.sizes.items() if other != name]
    told = ("phase", "dtype", "weights_dtype", "kv_dtype")
    labels = [str(value) for key, value in row.labels.items() if key not in told]
    return f"{', '.join(sizes)} on {chips} ({', '.join([*labels, *_stored(row)])})"


def _stored(row: Any) -> Iterator[str]:
    """ "weights fp8", "cache bf16": the precision that holds most bytes of each."""
    graph = row.estimate.plan.source
    for role, name in (("weights", "weights"), ("kv", "cache")):
        sizes = Counter[str]()
        for index in graph.external:
            tensor = graph.values[index]
            if tensor.role == role and tensor.storage == index:
                sizes[tensor.dtype] += graph.times(tensor) * tensor.nbytes
        if sizes:
            yield f"{name} {sizes.most_common(1)[0][0]}"


def _worth(row: Any, result: serving.ServingAnswer) -> Iterator[str]:
    item = result.item
    yield f"{_digits(row.per_chip)} {item}s/s of a chip"
    if row.labels.get("phase") == "decode":
        yield f"{_digits(row.per_user)} {item}s/s of a user"
    if row.dollars is not None:
        yield f"${_digits(row.dollars)} per million {item}s"
    if row.joules is not None:
        yield f"{_digits(row.joules)} J a {item}"
    own, other = row.configuration.pools
    if result.service.apart:
        ratio = row.prefilling / (1 - row.prefilling)
        yield f"{_digits(ratio)} {other.name} of prefill for each {own.name} of decode"
    if row.sent:
        yield f"{format_time(row.sent)} of the step to exchange data"
    yield f"limited by {words.limit(row.limiter)}"


def _value(row: Any, name: str) -> str:
    if name == "memory":
        return str(format_capacity(row.memory))
    return str(format_time(getattr(row, name)))


def _limit(result: serving.ServingAnswer, row: Any, name: str) -> str:
    if name == "memory":
        return str(format_capacity(row.capacity))
    return str(format_time(dict(result.limits)[name]))


def _table(result: serving.ServingAnswer, rows: Sequence[Any], speeds: bool = False) -> view.Table:
    unit, decodes = result.item, rows[0].labels.get("phase") == "decode"
    columns = [
        view.Column("chips", units.EXACT, "chips"),
        view.Column("chip", units.TEXT, "chip"),
        *_labels(rows),
        view.Column("size", units.EXACT, result.name, of=entry("sizes", result.name)),
        view.Column("tpot", units.SECOND, "time per token" if decodes else "step"),
        view.Column("ttft", units.SECOND, "time to first token", short="to first", drop=1),
        view.Column("per_user", units.RATE, f"{unit}s/s of a user", short="user/s"),
        view.Column("per_chip", units.RATE, f"{unit}s/s of a chip", short="chip/s"),
        view.Column("dollars", _DOLLARS, f"per million {unit}s", short="$/M"),
        view.Column("joules", _JOULES, f"J per {unit}", short="J each", drop=2),
        view.Column("memory", units.CAPACITY, "memory", drop=2),
        view.Column("limiter", units.LIMITS, "limited by", drop=3),
    ]
    if not any(row.ttft for row in rows):
        columns = [column for column in columns if column.key != "ttft"]
    if not speeds:
        columns = [column for column in columns if column.key != "per_user"]
    return view.Table(columns=columns, rows=rows, padded=False)


def _labels(rows: Sequence[Any]) -> Iterator[view.Column]:
    """A column for each label in which rows differ."""
    for name in words.differing([row.labels for row in rows]):
        yield view.Column(name, units.TEXT, name, of=entry("labels", name))


def _spread(rows: Sequence[Any], most: int) -> list[Any]:
    if len(rows) <= most:
        return list(rows)
    places = {round(i * (len(rows) - 1) / (most - 1)) for i in range(most)}
    return [rows[place] for place in sorted(places)]


# -- rates, lengths, chips -------------------------------------------------------------------------


def rates_view(result: workloads.RatesAnswer, output: view.Output) -> view.View:
    """The limit of a step now, and each rate at which computing would limit it."""
    title = _head(result.title, result.sizes, result.chip)
    share = f"{result.share:.0%} of {format_time(result.step)}"
    head = [view.Note(f"limited by {words.limit(result.limiter)} for {share}")]
    if result.intensity is not None:
        head.append(view.Note(
            f"{format_intensity(result.intensity)} through HBM; the ridge of the chip is at "
            f"{format_intensity(result.ridge)}"
        ))  # fmt: skip
    parts = [note for rate in result.rates for note in _rate(rate)]
    made = view.Section(title="What would make computing the limit", parts=parts, place=2)
    return _three(title, head, made, result.rests)


def _rate(rate: workloads.NeededRate) -> Iterator[view.Note]:
    names = {"memory_bandwidth": "HBM bandwidth", "flops": f"FLOP rate ({rate.engine})",
             "link": "link bandwidth"}  # fmt: skip
    written = format_flop_rate if rate.fact == "flops" else format_bandwidth
    name = names[rate.fact]
    if rate.needed is None:
        yield view.Note(f"{name} {written(rate.now)}: {rate.why}", bullet=1)
        return
    word = "at most" if rate.fact == "flops" else "at least"
    step = f"; a step then takes {format_time(rate.step)}" if rate.step is not None else ""
    yield view.Note(
        f"{name} of {word} {written(rate.needed)}, {rate.factor:,.3g} times the "
        f"{written(rate.now)} of today{step}", bullet=1,
    )  # fmt: skip
    if rate.by_totals is not None:
        yield view.Note(
            f"by the totals of the step alone (one roofline): {written(rate.by_totals)}",
            "faint", bullet=2,
        )  # fmt: skip


def passing_view(result: workloads.PassingAnswer, output: view.Output) -> view.View:
    """The sizes around which attention passes the MLP."""
    title = _head(result.title, result.at, result.chip)
    low, high = result.looked
    if result.after is None:
        answer = f"attention takes less time than the MLP up to {result.name} {high:,}"
    elif result.before is None:
        answer = f"attention takes longer than the MLP from {result.name} {low:,} on"
    else:
        answer = f"attention takes longer than the MLP from {result.name} {result.after.size:,} on"
    rows = [x for x in (result.before, result.after) if x is not None]
    table = view.Table(
        columns=[
            view.Column("size", units.EXACT, result.name),
            view.Column("attention", units.SECOND, "attention"),
            view.Column("mlp", units.SECOND, "MLP"),
            view.Column("step", units.SECOND, "step"),
        ],
        rows=rows,
    )
    made = view.Section(parts=[table], place=2)
    return _three(title, [view.Note(answer, "strong")], made, result.rests)


def capacity_view(result: workloads.CapacityAnswer, output: view.Output) -> view.View:
    """The least number of each chip that holds a step."""
    title = _head(result.title, result.sizes)
    table = view.Table(
        columns=[
            view.Column("chips", units.EXACT, "chips"),
            view.Column("chip", units.TEXT, "chip"),
            *_labels(result.rows),
            view.Column("memory", units.CAPACITY, "memory"),
            view.Column("weights", units.CAPACITY, "weights", drop=1),
            view.Column("kv", units.CAPACITY, "cache", drop=1),
            view.Column("used", units.SHARE, "of their memory"),
            view.Column("dollars", _DOLLARS, "dollars an hour", short="$/h"),
        ],
        rows=result.rows,
    )
    best = result.rows[0]
    answer = f"fewest: {best.chips} x {best.chip}, {best.used:.0%} full"
    made = view.Section(parts=[table], place=2)
    return _three(title, [view.Note(answer, "strong")], made, result.rests)


def _three(
    title: str, head: Sequence[view.Part], made: view.Section, rests: Iterable[str]
) -> view.View:
    """The answer in words, the numbers that it is made of, and its grounds."""
    first = view.Section(parts=[view.Note(title, "strong"), *head], place=1)
    return view.View((first, made, grounds(rests, (), 3)), title)


def _head(title: str, sizes: Mapping[str, int], chip: str = "") -> str:
    """The title of an answer with its chip and sizes."""
    at = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
    on = f"{title} on {chip}" if chip else title
    return f"{on}, {at}" if at else on


# -- explorations ----------------------------------------------------------------------------------


_INTENSITY = units.Unit(
    "FLOP/byte", "number", lambda ratio: "no end" if math.isinf(ratio) else f"{ratio:,.1f}"
)


def _batch(cell: Any) -> Any:
    return view.Cell("none", "plain") if cell.batch is None else cell.batch


def _global(cell: Any) -> Any:
    return view.BLANK if cell.batch is None else cell.global_batch


_EXPLORED = (
    view.Column("devices", units.COUNT, "devices"),
    view.Column("kv", units.COUNT, "kv"),
    view.Column("flop_per_kv_byte", _INTENSITY, "FLOP per cache byte", short="OI_inf"),
    view.Column("flop_per_link_byte", _INTENSITY, "FLOP per link byte", short="OI_net"),
    view.Column("batch", units.COUNT, "least batch of a device", short="batch", of=_batch),
    view.Column("global_batch", units.COUNT, "of all devices", short="B_g", of=_global),
    view.Column("limiter", units.LIMITS, "limited by"),
    view.Column("t_comp", units.SECOND, "computing", drop=1),
    view.Column("t_hbm", units.SECOND, "HBM", drop=1),
    view.Column("t_net", units.SECOND, "link", drop=1),
)


def exploration_view(result: decode_forms.Exploration, output: view.Output) -> view.View:
    """A row for each number of devices and length of the cache."""
    rates = result.rates
    precisions = ", ".join(
        f"{name} {value}"
        for name, value in zip(("dtype", "weights", "cache"), result.precisions, strict=True)
        if value
    )
    where = f"{result.title}, decode; {result.chip}, {result.execution}"
    head = "; ".join(filter(None, (where, precisions)))
    routed = plural(result.experts, "routed expert") if result.experts > 1 else "no routed experts"
    conditions = (
        f"{format_flop_rate(rates.peak)}, {format_bandwidth(rates.memory)}, link "
        f"{format_bandwidth(rates.link)}; {routed} in a layer; computing "
        f"limits at {result.alpha:g} of the slower of HBM and link"
    )
    symbols = (
        "OI_inf: FLOP over bytes of cache that a further sequence adds; OI_net: over bytes of the "
        "link; B_g: the least batch of all devices together"
    )
    table = view.Table(columns=_EXPLORED, rows=result.cells, padded=False)
    notes = (view.Note(head, "strong"), view.Note(conditions), view.Note(symbols, "faint"))
    return view.View(
        (view.Section(parts=[*notes, table]),), f"When computing limits decode: {result.title}"
    )
