"""Answers to questions on a step: sizes, chips, precisions, money, rates, lengths."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rooftrace._progress import tell, telling
from rooftrace.errors import RequestError, hint
from rooftrace.hardware import units
from rooftrace.reporting.commands import questions
from rooftrace.reporting.commands.arguments import SolveArguments
from rooftrace.reporting.commands.estimates import Source
from rooftrace.reporting.commands.options import taken
from rooftrace.reporting.commands.questions import Question, grounds_of
from rooftrace.reporting.commands.requests import StepRequest
from rooftrace.reporting.commands.sweeps import (
    MOST_TRACES,
    decoding_first,
    form_of,
    known_form,
    lengths_in,
    level_values,
)
from rooftrace.reporting.renderers import words
from rooftrace.studies.solving import candidates, serving, workloads
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
    """Answer a question about a step, with the margin, the second best and the grounds.

    find: a size, as "batch" or "kv": its largest value within the limits; "cheapest", "energy",
    "throughput", "latency": the best deployment within them; "rates": the bandwidth, FLOP rate and
    link at which computing would limit; "passing": the length of the cache at which attention takes
    longer than the MLP; "chips": how many by capacity.  tpot, ttft, step: limits in seconds, or as
    "30 ms": per output token, to the first token of the longest prompt, of a step.
    mix: requests as "2048:256@3,8192:1024" (prompt, output, share), whose prefills delay the
    decode steps or run `apart`, on chips like these or on `prefill_chip`.  over: values of the open
    size.  chip: default all with a price for "cheapest", else "h200-sxm".  chips: how many share
    each product; default as few as hold the limits.  execution: default "serving" for prefill and
    decode, else "efficient".  price, power: dollar/hour and watt (with its share of the node) of
    one chip, for all or by name.  pue: energy of the building over that of its computers.
    kept_free: share of the memory.  at: the other sizes of a saved form.  chip, execution, dtype,
    kv_dtype: one or several.  Other arguments are those of `trace`.

    Raises RequestError for a size that there is not, limits that are no times, chips without a
    price where dollars are asked for; and the errors of `form`.  If no candidate meets the limits,
    the answer has no `best`, and names the nearest.
    """
    saved = known_form(source)
    arguments, kwargs = taken(SolveArguments, kwargs)
    find, over = arguments.find, arguments.over
    fixed, kwargs = questions.sizes_of_form(saved, at, kwargs)
    if kwargs.get("chip") is None and kwargs.get("system") is None and find in questions.OF_ALL:
        kwargs["chip"] = questions.all_chips(find)
    request = StepRequest.of(solve, source, args, kwargs, form=saved)
    other = questions.prefill_chip_of(arguments.prefill_chip, arguments.apart)
    every = [*request.chips, *other]
    chips = questions.with_costs(every, arguments.price, arguments.power, arguments.pue)
    chips, other = chips[: len(request.chips)], chips[len(request.chips) :]
    question = Question(
        **{**vars(request), "chips": chips}, find=find,
        values=None if over is None else level_values(*questions.over_of(over, find)),
        limits=questions.limits_of(arguments.step, arguments.tpot, arguments.ttft),
        service=questions.service_of(
            arguments.mix, arguments.apart, arguments.kept_free, *other
        ),
        counts=None if arguments.chips is None else questions.counts_of(arguments.chips),
        at=fixed, most=most,
    )  # fmt: skip
    questions.check(question)
    with telling(progress):
        return _answer(question)


def _answer(question: Question) -> Answer:
    if question.find == "rates":
        return _rates(question)
    if question.find == "passing":
        return _passing(question)
    if question.find == "chips":
        return _capacity(question)
    return _serving(question)


# -- answers ---------------------------------------------------------------------------------------


def _serving(question: Question) -> serving.ServingAnswer:
    from rooftrace.errors import TraceError

    alone = _at_its_least(question)
    form = alone or open_form(question)
    question = questions.settled(question, form)
    first = split_of(question, form)
    every = BATCHES if alone and question.values is None else every_size(question, form)

    def split_over(count: int) -> candidates.Split:
        if count == first.chips:
            return first if alone is None else split_of(question)
        job = over_chips(question, count, form.phase)
        try:
            return split_of(replace(question, job=job, values=every))
        except TraceError as error:
            raise RequestError(str(error)) from error

    table = candidates.Candidates(
        first=first, split_over=split_over, conditions=question.conditions, chips=question.chips,
        service=question.service, name=question.open, at=fixed_sizes(question, form),
    )  # fmt: skip
    counts = question.counts or ((first.chips,) if first.chips > 1 else None)
    objective = question.find if question.find in serving.OBJECTIVES else "largest"
    tell("evaluating all candidates")
    levels = levels_of(every)
    users = form.phase == "decode" and question.open == "batch"
    search = serving.Search.over(table, every, levels, counts, question.limits, objective)
    if not search.lines:
        raise RequestError(f"no candidate can be priced: {'; '.join(table.left_out)}")
    best = search.best()
    lines = [(line.chips, line.configuration) for line in search.lines if len(line.sizes) > 1]
    priced = {f"{count} x {at.chip.name}": at.split.form for count, at in lines}
    item = str(form.example.workload.get("item") or "sample")
    return serving.ServingAnswer(
        title=_title(question, form),
        item=item,
        question=_question(question, objective, item),
        objective=objective,
        name=question.open,
        limits=question.limits,
        service=question.service,
        rows=tuple(line.deployment(place) for line, place, _ in best),
        nearest=None if best else search.nearest(),
        breaks=search.breaks(best[0][0], best[0][1]) if best else (),
        span=search.span(best[0][0]) if best else None,
        front=search.front() if users else (),
        curves=tuple(line for line in search.lines if len(line.fits)) if users else (),
        rests=tuple(
            grounds_of(
                question,
                priced or {"": form},
                counts={line.chips for line in search.lines},
                first=[x.configuration.chip.name for x, _, _ in best],
            )
        ),
        evaluated=sum(len(line.sizes) for line in search.lines),
        sizes=(int(levels[0]), int(levels[-1])),
        left_out=tuple(table.left_out),
    )


def _title(question: Question, form: Form) -> str:
    """The model in the words of a report, and the phase; a precision that all candidates have."""
    told = {
        words.model_words(graph.model, graph.workload, graph.processes)
        for graph in (c.repriced(form.example) for c in question.conditions)
    }
    return f"{form.title if len(told) > 1 else told.pop()}, {form.phase}"


def _question(question: Question, objective: str, item: str) -> str:
    asked = serving.OBJECTIVES[objective].words.format(item=item)
    if objective == "largest":
        asked = f"{asked} {question.open}"
    limits = f", {question.limits}" if str(question.limits) else ""
    mix = f", of requests of {question.service.mix}" if question.service.mix is not None else ""
    return f"{asked}{limits}{mix}"


def _at_one_place(question: Question) -> tuple[Form, dict[str, int]]:
    """A form whose only sizes are the named ones."""
    if question.form is not None:
        return question.form, dict(question.at)
    batch = question.job.request.batch or 1
    form = open_form(replace(question, values=(batch,)))
    return form, {**fixed_sizes(question, form), "batch": batch}


def _rates(question: Question) -> workloads.RatesAnswer:
    form, sizes = _at_one_place(question)
    question = questions.settled(question, form)
    case = SweepCase(form, question.conditions[0], {})
    form.numbers({name: sizes[name] for name in form.names if name in sizes})
    grounds = tuple(grounds_of(question, {"": form}))
    title = _title(question, form)
    return workloads.needed_rates(case, sizes, question.chips[0], title, grounds)


def _capacity(question: Question) -> workloads.CapacityAnswer:
    form, sizes = _at_one_place(question)
    question = questions.settled(question, form)
    sizes_of_form = {name: sizes[name] for name in form.names if name in sizes}
    kept_free = question.service.kept_free
    rows = [
        row
        for conditions in question.conditions
        for row in workloads.needed_chips(
            SweepCase(form, conditions, {}), sizes_of_form, question.chips, kept_free
        )
    ]
    rows.sort(key=lambda row: (row.chips, -row.used))
    return workloads.CapacityAnswer(
        title=_title(question, form), sizes=sizes, rows=tuple(rows),
        rests=("by capacity alone: chips share weights, cache and activations evenly, and nothing "
               "is kept twice", *grounds_of(question, {"": form})),
    )  # fmt: skip


def _passing(question: Question) -> workloads.PassingAnswer:
    form = open_form(question)
    question = questions.settled(question, form)
    name = question.open if question.open in form.names else form.names[0]
    fixed = fixed_sizes(question, form)
    place = form.names.index(name)
    low = min(regime.low[place] for regime in form.regimes)
    high = max(regime.high[place] for regime in form.regimes)
    conditions = question.conditions[0]
    sizes = {n: v for n, v in fixed.items() if n in form.names}

    def shares(size: int) -> workloads.FamilyTimes:
        tell(f"pricing {name} {size:,}")
        result = form.estimate(
            question.chips[0], conditions.execution, conditions.dtype, conditions.weights_dtype,
            conditions.kv_dtype, **sizes, **{name: size},
        )  # fmt: skip
        return workloads.times_of(result, size)

    before, after = workloads.passing(shares, low, high)
    return workloads.PassingAnswer(
        title=_title(question, form), chip=question.chips[0].name, name=name, at=fixed,
        looked=(low, high), before=before, after=after,
        rests=("attention: its kernels and the products around them; MLP: the other products of "
               "layers (families dense and moe), without the head",
               *grounds_of(question, {"": form})),
    )  # fmt: skip


# -- open forms ------------------------------------------------------------------------------------


BATCHES = range(1, 4097)
"""The default batches."""
_EVERY = 512
_A_DOUBLING = 128
"""Sizes that are tried first: every one up to the first number, then so many for each doubling."""


def open_form(question: Question) -> Form:
    """The form over the open size."""
    if question.form is not None:
        return question.form
    values = question.values
    if values is None:
        values = BATCHES if question.open == "batch" else level_values(question.open, None)

    decoding = question.service.mix is not None or question.limits.tpot is not None

    def build(job: Job) -> Form:
        if decoding and job.phases != ("decode",):
            raise RequestError(
                "tpot and mix are of decode steps: name the phase decode, or limit a step with "
                "step="
            )
        if question.service.mix is not None:
            job = replace(job, request=replace(job.request, kv=question.service.mix.kv))
        return form_of(job, {question.open: values}, question.most)

    return decoding_first(question.job, build, must_decode=decoding)


def _at_its_least(question: Question) -> Form | None:
    """The step of a config at its smallest batch alone; None where the question is of other chips.

    It tells how many chips hold the step, at the price of one trace: one chip holds few of them.
    """
    job, open_batch = question.job, question.open == "batch"
    if not job.is_config_or_program or question.counts or job.request.mesh or not open_batch:
        return None
    return open_form(replace(question, values=(question.values or BATCHES)[:1]))


def split_of(question: Question, form: Form | None = None) -> candidates.Split:
    """The step of a question as each of its chips runs it.  form: the step, where it is there."""
    prefill = prefill_form(question) if question.service.mix is not None else None
    return candidates.Split(form or open_form(question), prefill)


def over_chips(question: Question, count: int, phase: str) -> Job:
    """The job over a mesh of so many chips.  Raises RequestError for a form or source without."""
    if question.form is not None:
        raise RequestError(
            f"a saved form is of {units.plural(question.form.example.processes, 'chip')}; name the "
            "model itself"
        )
    request = replace(question.job.request, mesh={"tp": count} if count > 1 else {})
    job = replace(question.job, request=request, phases=(phase,), explicit=("mesh",))
    job.check_source()
    return job


def prefill_form(question: Question) -> Form:
    """The prefill of one prompt, traced at each length by itself."""
    from rooftrace.tracer.phases import SizedSource

    request = replace(question.job.request, batch=1, kv=None)
    job = replace(question.job, phases=("prefill",), request=request, explicit=())
    sized = SizedSource(job, ("seq",))

    def trace(numbers: tuple[int, ...]) -> Any:
        tell(f"tracing the prefill of {numbers[0]:,} tokens")
        return sized.graphs(numbers)["prefill"]

    return Form(title=question.job.name, phase="prefill", names=("seq",), regimes=(), trace=trace)


def fixed_sizes(question: Question, form: Form) -> dict[str, int]:
    """The fixed sizes, for readers of the answer."""
    if question.form is not None:
        fixed = {name: value for name, value in question.at.items()}
        left = [name for name in form.names if name not in fixed and name != question.open]
        if left:
            raise RequestError(
                f"at: this form is over {', '.join(form.names)}; say {' and '.join(left)}, for "
                f"example at={{{left[0]!r}: 4096}}"
            )
        for name in fixed:
            if name not in form.names or name == question.open:
                raise RequestError(f"at {name!r}: it is no fixed size{hint(name, form.names)}")
        return fixed
    workload = form.regimes[0].form.example.workload if form.regimes else {}
    sizes = {}
    for name in ("batch", "kv" if form.phase == "decode" else "seq"):
        value = getattr(question.job.request, name) or workload.get(name)
        if name != question.open and value:
            sizes[name] = int(value)
    if question.service.mix is not None:
        sizes["kv"] = question.service.mix.kv
    return sizes


def every_size(question: Question, form: Form) -> Sequence[int]:
    """The values of the open size, in rising order."""
    place = form.names.index(question.open) if question.open in form.names else -1
    if place < 0:
        raise RequestError(
            f"find {question.find!r}: this form is over {', '.join(form.names)}"
            f"{hint(question.open, form.names)}"
        )
    if question.values is not None:
        return question.values
    low = min((regime.low[place] for regime in form.regimes), default=1)
    high = max((regime.high[place] for regime in form.regimes), default=1)
    return lengths_in(question.job, question.open, range(low, high + 1))


def levels_of(every: Sequence[int]) -> Sequence[int]:
    """The sizes of many that are tried first: the first ones, then some of each doubling."""
    if len(every) <= 2 * _EVERY:
        return every
    indices = list(range(_EVERY))
    while indices[-1] < len(every) - 1:
        next_size = every[indices[-1]] * (1 + 1 / _A_DOUBLING)
        farther = bisect.bisect_left(every, next_size)
        indices.append(min(max(farther, indices[-1] + 1), len(every) - 1))
    return [every[index] for index in indices]
