"""Answers to what people ask of a step: sizes, chips, precisions, money, rates, lengths."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rooftrace._progress import tell, telling
from rooftrace.errors import RequestError, hint
from rooftrace.hardware import units
from rooftrace.reporting.commands import questions as asking
from rooftrace.reporting.commands.arguments import SolveArguments
from rooftrace.reporting.commands.estimates import Source
from rooftrace.reporting.commands.options import taken
from rooftrace.reporting.commands.questions import Question, grounds_of
from rooftrace.reporting.commands.requests import StepRequest
from rooftrace.reporting.commands.stepforms import (
    MOST_TRACES,
    decoding_first,
    form_of,
    known_form,
    level_values,
)
from rooftrace.studies.solving import candidates as tables, serving, workloads
from rooftrace.studies.sweeps import Form, SweepCase
from rooftrace.tracer import Job

Answer = (
    serving.ServingAnswer
    | workloads.RatesAnswer
    | workloads.PassingAnswer
    | workloads.CapacityAnswer
)


def solve(
    source: Source,
    *args: Any,
    at: Mapping[str, int] | None = None,
    most: int = MOST_TRACES,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> Answer:
    """The answer to a question about a step, with its margin, the second best and its grounds.

    find: a size, as "batch" or "kv": its largest value within the limits; "cheapest", "energy",
    "throughput", "latency": the best deployment within them; "rates": the bandwidth, FLOP rate and
    link at which computing would limit; "passing": the length of the cache at which attention takes
    longer than the MLP; "chips": how many by capacity.  tpot, ttft, step: limits in seconds, or as
    "30 ms": per output token, to the first token of the longest prompt (no queue), of a step.
    mix: requests as "2048:256@3,8192:1024" (prompt, output, share), whose prefills run between the
    decode steps or `apart`.  over: values of the open size.  chip: default all with a price for
    "cheapest", else "h200-sxm".  chips: how many share each product; default as few as hold the
    limits.  execution: default "serving" for prefill and decode, else "efficient".  price, power:
    dollar/hour and watt of one chip, for all or by name.  kept_free: share of the memory.  at:
    the other sizes of a saved form.  chip, execution, dtype, kv_dtype: one or several.  Other
    arguments are those of `trace`.

    Raises RequestError for a size that there is not, limits that are no times, chips without a
    price where dollars are asked for; and what `form` raises.  Where nothing holds the limits, the
    answer has no `best`, and says what is nearest.
    """
    known = known_form(source)
    own, kwargs = taken(SolveArguments, kwargs)
    find = own.find
    fixed, kwargs = asking.sizes_of_form(known, at, kwargs)
    if kwargs.get("chip") is None and kwargs.get("system") is None and find in asking.OF_ALL:
        kwargs["chip"] = asking.all_chips(find)
    request = StepRequest.of(solve, source, args, kwargs, form=known)
    own_numbers = {"chips": asking.with_own_numbers(request.chips, own.price, own.power)}
    asked = Question(
        **{**vars(request), **own_numbers}, find=find,
        values=None if own.over is None else level_values(*asking.over_of(own.over, find)),
        limits=asking.limits_of(own.step, own.tpot, own.ttft),
        service=asking.service_of(own.mix, own.apart, own.kept_free),
        counts=None if own.chips is None else asking.counts_of(own.chips),
        at=fixed, most=most,
    )  # fmt: skip
    asking.check(asked)
    with telling(progress):
        return _answer(asked)


def _answer(asked: Question) -> Answer:
    if asked.find == "rates":
        return _rates(asked)
    if asked.find == "passing":
        return _passing(asked)
    if asked.find == "chips":
        return _capacity(asked)
    return _serving(asked)


# -- answers ---------------------------------------------------------------------------------------


def _serving(asked: Question) -> serving.ServingAnswer:
    from rooftrace.tracer import TraceError

    form = open_form(asked)
    asked = asking.settled(asked, form)
    first = split_of(asked, form)
    every = every_size(asked, form)

    def split_over(count: int) -> tables.Split:
        job = over_chips(asked, count, form.phase)
        try:
            return split_of(replace(asked, job=job, values=every))
        except TraceError as error:
            raise RequestError(str(error)) from error

    candidates = tables.Candidates(
        first=first, split_over=split_over, conditions=asked.conditions, chips=asked.chips,
        service=asked.service, name=asked.open, at=fixed_sizes(asked, form),
    )  # fmt: skip
    counts = asked.counts or ((first.chips,) if first.chips > 1 else None)
    objective = asked.find if asked.find in serving.OBJECTIVES else "largest"
    tell("evaluating all candidates")
    levels = levels_of(every)
    users = form.phase == "decode" and asked.open == "batch"
    search = serving.Search.over(candidates, every, levels, counts, asked.limits, objective)
    if not search.lines:
        raise RequestError(f"no candidate can be priced: {'; '.join(candidates.left_out)}")
    best = search.best()
    item = str(form.example.workload.get("item") or "sample")
    return serving.ServingAnswer(
        title=f"{form.title}, {form.phase}",
        item=item,
        question=_question(asked, objective, item),
        objective=objective,
        name=asked.open,
        limits=asked.limits,
        service=asked.service,
        rows=tuple(line.deployment(place) for line, place, _ in best),
        nearest=None if best else search.nearest(),
        breaks=search.breaks(best[0][0], best[0][1]) if best else (),
        span=search.span(best[0][0]) if best else None,
        front=search.front() if users else (),
        curves=tuple(line for line in search.lines if len(line.fits)) if users else (),
        rests=tuple(
            grounds_of(
                asked,
                form,
                counts={line.chips for line in search.lines},
                first=[x.configuration.chip.name for x, _, _ in best],
            )
        ),
        evaluated=sum(len(line.sizes) for line in search.lines),
        sizes=(int(levels[0]), int(levels[-1])),
        left_out=tuple(candidates.left_out),
    )


def _question(asked: Question, objective: str, item: str) -> str:
    words = serving.OBJECTIVES[objective].words.format(item=item)
    if objective == "largest":
        words = f"{words} {asked.open}"
    limits = f", {asked.limits}" if str(asked.limits) else ""
    mix = f", of requests of {asked.service.mix}" if asked.service.mix is not None else ""
    return f"{words}{limits}{mix}"


def _at_one_place(asked: Question) -> tuple[Form, dict[str, int]]:
    """A form whose only sizes are those that were asked for."""
    if asked.form is not None:
        return asked.form, dict(asked.at)
    batch = asked.job.request.batch or 1
    form = open_form(replace(asked, values=(batch,)))
    return form, {**fixed_sizes(asked, form), "batch": batch}


def _rates(asked: Question) -> workloads.RatesAnswer:
    form, sizes = _at_one_place(asked)
    asked = asking.settled(asked, form)
    case = SweepCase(form, asked.conditions[0], {})
    form.numbers({name: sizes[name] for name in form.names if name in sizes})
    grounds = tuple(grounds_of(asked, form))
    title = f"{form.title}, {form.phase}"
    return workloads.needed_rates(case, sizes, asked.chips[0], title, grounds)


def _capacity(asked: Question) -> workloads.CapacityAnswer:
    form, sizes = _at_one_place(asked)
    asked = asking.settled(asked, form)
    own = {name: sizes[name] for name in form.names if name in sizes}
    rows = [
        row
        for conditions in asked.conditions
        for row in workloads.needed_chips(
            SweepCase(form, conditions, {}), own, asked.chips, asked.service.kept_free
        )
    ]
    rows.sort(key=lambda row: (row.chips, -row.used))
    return workloads.CapacityAnswer(
        title=f"{form.title}, {form.phase}", sizes=sizes, rows=tuple(rows),
        rests=("by capacity alone: chips share weights, cache and activations evenly, and nothing "
               "is kept twice", *grounds_of(asked, form)),
    )  # fmt: skip


def _passing(asked: Question) -> workloads.PassingAnswer:
    form = open_form(asked)
    asked = asking.settled(asked, form)
    name = asked.open if asked.open in form.names else form.names[0]
    fixed = fixed_sizes(asked, form)
    place = form.names.index(name)
    low = min(regime.low[place] for regime in form.regimes)
    high = max(regime.high[place] for regime in form.regimes)
    conditions = asked.conditions[0]
    own = {n: v for n, v in fixed.items() if n in form.names}

    def shares(size: int) -> workloads.FamilyTimes:
        tell(f"pricing {name} {size:,}")
        result = form.estimate(
            asked.chips[0], conditions.execution, conditions.dtype, conditions.weights_dtype,
            conditions.kv_dtype, **own, **{name: size},
        )  # fmt: skip
        return workloads.times_of(result, size)

    before, after = workloads.passing(shares, low, high)
    return workloads.PassingAnswer(
        title=f"{form.title}, {form.phase}", chip=asked.chips[0].name, name=name, at=fixed,
        looked=(low, high), before=before, after=after,
        rests=("attention: its kernels and the products around them; MLP: the other products of "
               "layers (families dense and moe), without the head",
               *grounds_of(asked, form)),
    )  # fmt: skip


# -- openforms -------------------------------------------------------------------------------------
# The forms that a question is answered with: of the step with one size open, and of prefills.


BATCHES = range(1, 4097)
"""Batches that are looked at where none are asked for."""
_EVERY = 512
_A_DOUBLING = 128
"""Sizes that are tried first: every one to the first number, then so many for each doubling."""


def open_form(asked: Question) -> Form:
    """The form over the size that is left open."""
    if asked.form is not None:
        return asked.form
    values = asked.values
    if values is None:
        values = BATCHES if asked.open == "batch" else level_values(asked.open, None)

    decoding = asked.service.mix is not None or asked.limits.tpot is not None

    def build(job: Job) -> Form:
        if decoding and job.phases != ("decode",):
            raise RequestError(
                "tpot and mix are of decode steps: name the phase decode, or limit a step with "
                "step="
            )
        if asked.service.mix is not None:
            job = replace(job, request=replace(job.request, kv=asked.service.mix.kv))
        return form_of(job, {asked.open: values}, asked.most)

    return decoding_first(asked.job, build, must_decode=decoding)


def split_of(asked: Question, form: Form | None = None) -> tables.Split:
    """The step of a question as each of its chips runs it.  form: the step, where it is there."""
    prefill = prefill_form(asked) if asked.service.mix is not None else None
    return tables.Split(form or open_form(asked), prefill)


def over_chips(asked: Question, count: int, phase: str) -> Job:
    """The job over a mesh of so many chips.  Raises RequestError for what takes no mesh."""
    if asked.form is not None:
        raise RequestError(
            f"a saved form is of {units.plural(asked.form.example.processes, 'chip')}; name the "
            "model itself"
        )
    request = replace(asked.job.request, mesh={"tp": count} if count > 1 else {})
    job = replace(asked.job, request=request, phases=(phase,), explicit=("mesh",))
    job.check_source()
    return job


def prefill_form(asked: Question) -> Form:
    """The prefill of one prompt, traced at each length by itself."""
    from rooftrace.tracer.phases import SizedSource

    request = replace(asked.job.request, batch=1, kv=None)
    job = replace(asked.job, phases=("prefill",), request=request, explicit=())
    sized = SizedSource(job, ("seq",))

    def trace(numbers: tuple[int, ...]) -> Any:
        tell(f"tracing the prefill of {numbers[0]:,} tokens")
        return sized.graphs(numbers)["prefill"]

    return Form(title=asked.job.name, phase="prefill", names=("seq",), regimes=(), trace=trace)


def fixed_sizes(asked: Question, form: Form) -> dict[str, int]:
    """The sizes that are fixed, for those who read the answer."""
    if asked.form is not None:
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


def every_size(asked: Question, form: Form) -> Sequence[int]:
    """The sizes that are asked for, of the size that is left open, in rising order."""
    place = form.names.index(asked.open) if asked.open in form.names else -1
    if place < 0:
        raise RequestError(
            f"find {asked.find!r}: this form is over {', '.join(form.names)}"
            f"{hint(asked.open, form.names)}"
        )
    if asked.values is not None:
        return asked.values
    low = min((regime.low[place] for regime in form.regimes), default=1)
    high = max((regime.high[place] for regime in form.regimes), default=1)
    return range(low, high + 1)


def levels_of(every: Sequence[int]) -> Sequence[int]:
    """Those of many sizes that are tried first: the first ones, then some of each doubling."""
    if len(every) <= 2 * _EVERY:
        return every
    places = list(range(_EVERY))
    while places[-1] < len(every) - 1:
        next_size = every[places[-1]] * (1 + 1 / _A_DOUBLING)
        farther = bisect.bisect_left(every, next_size)
        places.append(min(max(farther, places[-1] + 1), len(every) - 1))
    return [every[place] for place in places]
