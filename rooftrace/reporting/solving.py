"""Answers to what people ask of a step: sizes, chips, precisions, money, rates, lengths."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rooftrace._progress import tell, telling
from rooftrace.costmodels.answers import (
    Candidates,
    Limits,
    Mix,
    Service,
    capacity,
    passing,
    rates,
    serving,
)
from rooftrace.costmodels.execution import ExecutionModel, execution_model
from rooftrace.costmodels.planforms import Conditions
from rooftrace.costmodels.rewriting import check_precisions
from rooftrace.costmodels.sweeping import Form, SweepCase
from rooftrace.errors import NoCacheError, RequestError, hint
from rooftrace.hardware import Chip, available_chips, load_chip, units
from rooftrace.hardware.chip import Fact
from rooftrace.reporting.estimates import CHIP, Source
from rooftrace.reporting.stepforms import MOST_TRACES, USUAL, form_of, known_form, level_values
from rooftrace.tracer.asking import Job

BATCHES = range(1, 4097)
"""Batches that are looked at where none are asked for."""
_EVERY = 512
_A_DOUBLING = 128
"""Sizes that are tried first: every one to the first number, then so many for each doubling."""
OTHERS = ("rates", "passing", "chips")
Answer = serving.ServingAnswer | rates.RatesAnswer | passing.PassingAnswer | capacity.CapacityAnswer


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A question as it is asked: what is looked for, in which steps, on which chips."""

    job: Job
    known: Form | None  # a form from a file, in place of the job
    find: str  # the size of which the largest is looked for, an objective, or one of OTHERS
    values: Sequence[int] | None  # of the size that is left open
    limits: Limits
    service: Service
    chips: tuple[Chip, ...]
    counts: tuple[int, ...] | None
    conditions: tuple[Conditions, ...]
    at: Mapping[str, int]  # other sizes of a known form
    most: int

    @property
    def open(self) -> str:
        """The name of the size that is left open."""
        if self.find in serving.OBJECTIVES or self.find in OTHERS:
            return "kv" if self.find == "passing" else "batch"
        return self.find


def solve(
    source: Source,
    *args: Any,
    find: str = "batch",
    tpot: float | str | None = None,
    ttft: float | str | None = None,
    step: float | str | None = None,
    mix: str | Mix | None = None,
    over: Any = None,
    chip: str | Chip | Sequence[str | Chip] | None = None,
    chips: int | Sequence[int] | None = None,
    execution: str | ExecutionModel | Sequence[str | ExecutionModel] = "serving",
    phase: str | None = None,
    dtype: str | Sequence[str | None] | None = None,
    weights_dtype: str | None = None,
    kv_dtype: str | Sequence[str | None] | None = None,
    price: float | Mapping[str, float] | None = None,
    power: float | Mapping[str, float] | None = None,
    apart: bool = False,
    kept_free: float = 0.0,
    at: Mapping[str, int] | None = None,
    most: int = MOST_TRACES,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> Answer:
    """The answer to a question about a step, with its margin, the second best and its grounds.

    find: the name of a size, as "batch" or "kv": its largest value within the limits; "cheapest",
    "energy", "throughput", "latency": the best deployment within them; "rates": the bandwidth, FLOP
    rate and link at which computing would limit; "passing": the length of the cache (or the
    sequence) at which attention takes longer than the MLP; "chips": how many by capacity.

    tpot, ttft, step: limits in seconds, or as "30 ms".  tpot is the time per output token, ttft the
    time to the first token of the longest prompt, without a queue.  mix: the requests, as
    "2048:256@3,8192:1024@1" (tokens of prompt and output, and shares); their prefills run between
    the decode steps, unless they are `apart`, on chips of their own.  over: values of the size that
    is left open.  chip: one or several; default all with a price for "cheapest", else "h200-sxm".
    chips: how many together; default as few as hold the limits.  Several chips share each product
    evenly and send the residual stream after each attention and MLP.  price, power: dollar/hour and
    watt of one chip in place of those of its file, for all or by name.  kept_free: share of the
    memory that stays free.  at: the other sizes of a saved form.  execution, dtype, kv_dtype: one or
    several.  Other arguments are those of `trace`.

    Raises RequestError for a size that there is not, limits that are no times, chips without a
    price where dollars are asked for; and what `form` raises.  Limits that nothing holds are no
    error: the answer then has no `best`, and says what is nearest.
    """
    requests = Mix.of(mix) if isinstance(mix, str) else mix
    known = known_form(source)
    job = Job(source="a form") if known else Job.of(solve, source, args, kwargs, phase=phase)
    several = [
        Conditions(execution_model(model), first, weights_dtype, second)
        for model in _listed(execution, (str, ExecutionModel))
        for first in _listed(dtype, (str, type(None)))
        for second in _listed(kv_dtype, (str, type(None)))
    ]
    for each in several:
        check_precisions(each.dtype, each.weights_dtype, each.kv_dtype)
    if not 0 <= kept_free < 1:
        raise RequestError(f"kept_free {kept_free:g}: expected a share from 0 to below 1")
    named = _chips_of(chip, find)
    asked = Asked(
        job=job,
        known=known,
        find=find,
        values=None if over is None else level_values(*_over_of(over, find)),
        limits=Limits(
            step=seconds_of("step", step), tpot=seconds_of("tpot", tpot),
            ttft=seconds_of("ttft", ttft),
        ),
        service=Service(mix=requests, apart=apart, kept_free=kept_free),
        chips=tuple(_with(c, _own("price", price, named), _own("power", power, named))
                    for c in named),
        counts=None if chips is None else _counts(chips),
        conditions=tuple(several),
        at=dict(at or {}),
        most=most,
    )  # fmt: skip
    _check(asked)
    with telling(progress):
        return _answer(asked)


def _answer(asked: Asked) -> Answer:
    if asked.find == "rates":
        return _rates(asked)
    if asked.find == "passing":
        return _passing(asked)
    if asked.find == "chips":
        return _capacity(asked)
    return _serving(asked)


# -- what is asked ---------------------------------------------------------------------------------


def seconds_of(name: str, value: float | str | None) -> float | None:
    """Seconds of a number, or of a text such as "30 ms".  Raises RequestError for another text."""
    if value is None or isinstance(value, (int, float)):
        return value
    try:
        return float(units.parse(value, "second"))
    except ValueError:
        raise RequestError(f"{name} {value!r}: expected a time, for example 30 ms") from None


def _listed(value: Any, kinds: tuple[type, ...]) -> list[Any]:
    return [value] if isinstance(value, kinds) else list(value)


def _over_of(over: Any, find: str) -> tuple[str, Any]:
    if isinstance(over, Mapping):
        if len(over) != 1:
            raise RequestError(
                f"over {', '.join(map(str, over))}: one size is left open; fix the others"
            )
        ((name, values),) = over.items()
        return str(name), values
    return find, over


def _counts(chips: int | Sequence[int]) -> tuple[int, ...]:
    counts = (chips,) if isinstance(chips, int) else tuple(sorted(set(chips)))
    if not counts or min(counts) < 1:
        raise RequestError(f"chips {chips!r}: expected numbers from 1")
    return counts


def _chips_of(chip: Any, find: str) -> list[Chip]:
    if chip is not None:
        return [load_chip(name) for name in _listed(chip, (str, Chip, os.PathLike))]
    if find not in ("cheapest", "chips"):
        return [load_chip(CHIP)]
    loaded = map(load_chip, available_chips())
    return [c for c in loaded if c.kind == "gpu" and (c.price is not None or find == "chips")]


def _own(name: str, values: Any, chips: Sequence[Chip]) -> Mapping[str, float]:
    """Numbers by name of a chip, of one for all or of a mapping."""
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        values = {c.name: values for c in chips}
    names = {alias: c.name for c in chips for alias in (c.name, *c.aliases)}
    own = {}
    for chip, value in values.items():
        if chip not in names:
            raise RequestError(
                f"{name} of {chip!r}: no chip of this question{hint(chip, list(names))}"
            )
        if not value > 0:
            raise RequestError(f"{name} of {chip}: {value!r}: expected a number above 0")
        own[names[chip]] = float(value)
    return own


def _with(chip: Chip, prices: Mapping[str, float], powers: Mapping[str, float]) -> Chip:
    changed: dict[str, Any] = {}
    for name, unit, values in (("price", "dollar/hour", prices), ("power", "watt", powers)):
        if chip.name in values:
            value = values[chip.name]
            changed[name] = Fact(value, f"{value:g} {unit}", "as asked for", "measured")
    return replace(chip, **changed) if changed else chip


def _check(asked: Asked) -> None:
    """Raise RequestError for what contradicts itself."""
    find, service, limits = asked.find, asked.service, asked.limits
    if find == "cheapest" and not any(c.price for c in asked.chips):
        names = ", ".join(c.name for c in asked.chips)
        raise RequestError(f"find cheapest: no price is known of {names}; give one with price=")
    if find == "energy" and not any(c.power for c in asked.chips):
        names = ", ".join(c.name for c in asked.chips)
        raise RequestError(f"find energy: no power is known of {names}; give one with power=")
    if limits.ttft is not None and service.mix is None:
        raise RequestError(
            f"ttft {limits.ttft:g} s: it is of prompts; give them with mix=, as 2048:256"
        )
    if service.apart and service.mix is None:
        raise RequestError("apart: it is for the prefills of a mix; give one with mix=")
    if service.mix is not None and asked.open != "batch":
        raise RequestError(f"mix: it says how long caches are; {asked.open} cannot be open beside")
    if service.mix is not None and asked.known is not None:
        raise RequestError("mix: a saved form has one phase and no prefill; name the model itself")
    if service.mix is not None and asked.job.request.kv is not None:
        raise RequestError("kv: the mix says how long caches are; leave one of them out")
    if find in OTHERS:
        for name, value in limits:
            raise RequestError(f"{name} {value:g} s: find {find} takes no limit")
    words = (*serving.OBJECTIVES, *OTHERS)
    if find not in words and find not in USUAL and "." not in find and asked.values is None:
        raise RequestError(
            f"find {find!r}: expected a size ({', '.join(USUAL)}, or another one with its values "
            f"in over=) or one of {', '.join(words)}{hint(find, (*words, *USUAL))}"
        )


# -- forms -----------------------------------------------------------------------------------------


def _phased(asked: Asked, build: Callable[[Job], Any]) -> Any:
    """What a job gives: of a decode step where the source has one and no phase is named."""
    from rooftrace.tracer.source import TraceError

    job = asked.job
    decoding = asked.service.mix is not None or asked.limits.tpot is not None
    if job.phases is None and job.is_named and not job.is_code and not job.is_graph:
        try:
            return build(replace(job, phases=("decode",)))
        except (NoCacheError, RequestError, TraceError):
            if decoding:
                raise
    if decoding and job.phases != ("decode",) and asked.known is None:
        raise RequestError(
            "tpot and mix are of decode steps: name the phase decode, or limit a step with step="
        )
    return build(job.of_one_phase())


def _open_form(asked: Asked) -> Form:
    """The form over the size that is left open."""
    if asked.known is not None:
        return asked.known
    values = asked.values
    if values is None:
        values = BATCHES if asked.open == "batch" else level_values(asked.open, None)

    def build(job: Job) -> Form:
        if asked.service.mix is not None:
            job = replace(job, request=replace(job.request, kv=asked.service.mix.kv))
        return form_of(job, {asked.open: values}, asked.most)

    form: Form = _phased(asked, build)
    return form


def _prefill(asked: Asked) -> Form:
    """The prefill of one prompt, traced at each length by itself."""
    from rooftrace.tracer.sizing import SizedSource

    request = replace(asked.job.request, batch=1, kv=None)
    job = replace(asked.job, phases=("prefill",), request=request, explicit=())
    sized = SizedSource(job, ("seq",))

    def trace(numbers: tuple[int, ...]) -> Any:
        tell(f"tracing the prefill of {numbers[0]:,} tokens")
        return sized.graphs(numbers)["prefill"]

    return Form(title=asked.job.name, phase="prefill", names=("seq",), regimes=(), trace=trace)


def _sizes(asked: Asked, form: Form) -> dict[str, int]:
    """The sizes that are fixed, for those who read the answer."""
    if asked.known is not None:
        fixed = {name: value for name, value in asked.at.items()}
        left = [name for name in form.names if name not in fixed and name != asked.open]
        if left:
            raise RequestError(
                f"at: this form is over {', '.join(form.names)}; say {' and '.join(left)}, for "
                f"example at={{{left[0]!r}: 4096}}"
            )
        for name in fixed:
            if name not in form.names or name == asked.open:
                raise RequestError(f"at {name!r}: it is no fixed size{hint(name, form.names)}")
        return fixed
    workload = form.regimes[0].form.example.workload if form.regimes else {}
    sizes = {}
    for name in ("batch", "kv" if form.phase == "decode" else "seq"):
        value = getattr(asked.job.request, name) or workload.get(name)
        if name != asked.open and value:
            sizes[name] = int(value)
    if asked.service.mix is not None:
        sizes["kv"] = asked.service.mix.kv
    return sizes


def _levels(asked: Asked, form: Form) -> Sequence[int]:
    """The sizes that are tried first."""
    place = form.names.index(asked.open) if asked.open in form.names else -1
    if place < 0:
        raise RequestError(
            f"find {asked.find!r}: this form is over {', '.join(form.names)}"
            f"{hint(asked.open, form.names)}"
        )
    values = asked.values
    if values is None:
        low = min((regime.low[place] for regime in form.regimes), default=1)
        high = max((regime.high[place] for regime in form.regimes), default=1)
        values = range(low, high + 1)
    if len(values) <= 2 * _EVERY:
        return values
    levels = [value for value in values[:_EVERY]]
    while levels[-1] < values[-1]:
        step = max(1, (1 << (levels[-1].bit_length() - 1)) // _A_DOUBLING)
        levels.append(min(levels[-1] + step, values[-1]))
    return levels


# -- answers ---------------------------------------------------------------------------------------


def _serving(asked: Asked) -> serving.ServingAnswer:
    form = _open_form(asked)
    fixed = _sizes(asked, form)
    prefill = _prefill(asked) if asked.service.mix is not None else None
    cases = tuple(SweepCase(form, conditions, {}) for conditions in asked.conditions)
    prefills = tuple(
        None if prefill is None else SweepCase(prefill, conditions, {})
        for conditions in asked.conditions
    )
    candidates = Candidates(cases, prefills, asked.chips, asked.service, asked.open, fixed)
    objective = asked.find if asked.find in serving.OBJECTIVES else "largest"
    tell("evaluating all candidates")
    levels = _levels(asked, form)
    left_out = tuple(
        f"{chip.name}, {case.labels['dtype']}: {reason.split(';')[0]}"
        for place, case in enumerate(cases)
        for chip in asked.chips
        if (reason := candidates.missing(place, chip))
    )
    search = serving.Search.over(candidates, levels, asked.counts, asked.limits, objective)
    best = search.best()
    return serving.ServingAnswer(
        title=f"{form.title}, {form.phase}",
        question=_question(asked, objective),
        objective=objective,
        name=asked.open,
        limits=asked.limits,
        service=asked.service,
        rows=tuple(line.deployment(place) for line, place, _ in best),
        nearest=None if best else search.nearest(),
        breaks=search.breaks(best[0][0], best[0][1]) if best else (),
        span=search.span(best[0][0]) if best else None,
        front=search.front(),
        curves=tuple(search.curves()),
        rests=tuple(_grounds(asked, form, fixed, several=any(x.chips > 1 for x in search.lines))),
        evaluated=sum(len(line.sizes) for line in search.lines),
        sizes=(int(levels[0]), int(levels[-1])),
        left_out=left_out,
    )


def _question(asked: Asked, objective: str) -> str:
    words = serving.OBJECTIVES[objective].words
    if objective == "largest":
        words = f"{words} {asked.open}"
    limits = f", {asked.limits}" if str(asked.limits) else ""
    mix = f", of requests of {asked.service.mix}" if asked.service.mix is not None else ""
    return f"{words}{limits}{mix}"


def _at_one_place(asked: Asked) -> tuple[Form, dict[str, int]]:
    """A form whose only sizes are those that were asked for."""
    if asked.known is not None:
        return asked.known, dict(asked.at)
    batch = asked.job.request.batch or 1
    form = _open_form(replace(asked, values=(batch,)))
    return form, {**_sizes(asked, form), "batch": batch}


def _rates(asked: Asked) -> rates.RatesAnswer:
    form, sizes = _at_one_place(asked)
    case = SweepCase(form, asked.conditions[0], {})
    form.numbers({name: sizes[name] for name in form.names if name in sizes})
    grounds = tuple(_grounds(asked, form, sizes, several=False))
    title = f"{form.title}, {form.phase}"
    return rates.needed_rates(case, sizes, asked.chips[0], title, grounds)


def _capacity(asked: Asked) -> capacity.CapacityAnswer:
    form, sizes = _at_one_place(asked)
    own = {name: sizes[name] for name in form.names if name in sizes}
    rows = [
        row
        for conditions in asked.conditions
        for row in capacity.needed_chips(
            SweepCase(form, conditions, {}), own, asked.chips, asked.service.kept_free
        )
    ]
    rows.sort(key=lambda row: (row.chips, -row.used))
    return capacity.CapacityAnswer(
        title=f"{form.title}, {form.phase}", sizes=sizes, rows=tuple(rows),
        rests=("by capacity alone: chips share weights, cache and activations evenly, and nothing "
               "is kept twice", *_grounds(asked, form, sizes, several=False)),
    )  # fmt: skip


def _passing(asked: Asked) -> passing.PassingAnswer:
    form = _open_form(asked)
    name = asked.open if asked.open in form.names else form.names[0]
    fixed = _sizes(asked, form)
    place = form.names.index(name)
    low = min(regime.low[place] for regime in form.regimes)
    high = max(regime.high[place] for regime in form.regimes)
    conditions = asked.conditions[0]
    own = {n: v for n, v in fixed.items() if n in form.names}

    def shares(size: int) -> passing.Shares:
        tell(f"pricing {name} {size:,}")
        result = form.estimate(
            asked.chips[0], conditions.execution, conditions.dtype, conditions.weights_dtype,
            conditions.kv_dtype, **own, **{name: size},
        )  # fmt: skip
        return passing.shares_of(result, size)

    before, after = passing.passing(shares, low, high)
    return passing.PassingAnswer(
        title=f"{form.title}, {form.phase}", chip=asked.chips[0].name, name=name, at=fixed,
        looked=(low, high), before=before, after=after,
        rests=("attention: its kernels and the products around them; MLP: the other products of "
               "layers (families dense and moe), without the head",
               *_grounds(asked, form, fixed, several=False)),
    )  # fmt: skip


def _grounds(asked: Asked, form: Form, sizes: Mapping[str, int], *, several: bool) -> Iterator[str]:
    """What an answer rests on, in sentences."""
    service = asked.service
    models = ", ".join(dict.fromkeys(c.execution.name for c in asked.conditions))
    yield f"execution {models}; {_knobs(asked)}"
    if several:
        yield (
            "several chips: each product split evenly, and an all-reduce after each attention and "
            "each MLP that nothing overlaps, inside nodes of 8 chips by their own link"
        )
    if service.mix is not None:
        yield (
            f"decode steps with the mean cache of the requests, {service.mix.kv:,} tokens; "
            "memory too"
        )
        where = "on chips of their own" if service.apart else "between the decode steps"
        yield f"prefills one by one {where}; no queue in the time to the first token"
    priced = [c for c in asked.chips if c.price is not None and asked.find in ("cheapest", "chips")]
    for chip in priced[:3]:
        assert chip.price is not None
        yield f"price of {chip.name}: {chip.price.text} ({chip.price.source})"
    if len(priced) > 3:
        yield f"prices of the other {len(priced) - 3} chips: rooftrace chips show NAME"
    if any(c.power for c in asked.chips) and asked.find == "energy":
        yield "energy: chips at their full power, hosts and cooling apart"
    for line in form.where()[:3]:
        yield f"formulas proven for {line}"
    if any(regime.form.example.unrecorded for regime in form.regimes):
        yield "a part of the step ran out of sight of the trace: times and memory are too low"


def _knobs(asked: Asked) -> str:
    fitted = [c.name for c in asked.chips if asked.conditions[0].execution.knobs_on(c) is not None]
    if not fitted:
        return "times by the peaks of the datasheets, which real kernels do not reach: " \
               "calibrate with --knobs"  # fmt: skip
    return f"times by knobs fitted to measured steps ({', '.join(fitted[:4])})"


def plot_answer(answer: Answer, path: str | os.PathLike[str]) -> None:
    """Draw tokens per second of a chip over those of a user: each configuration, and the front.

    Raises RequestError for an answer that compares no deployments.
    """
    if not isinstance(answer, serving.ServingAnswer):
        raise RequestError(
            f"{path}: only a question about deployments has a figure, as find='cheapest'"
        )
    from rooftrace.reporting.figures import ofsizes, style

    style.save(ofsizes.front_plot(answer), Path(path))
