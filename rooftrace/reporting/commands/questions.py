"""Questions about sizes, limits and chips, checked, and the grounds of an answer in sentences."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rooftrace.costmodels.fusion import usual_execution
from rooftrace.costmodels.kernels import Knobs
from rooftrace.errors import RequestError, hint
from rooftrace.hardware import Chip, available_chips, load_chip, units
from rooftrace.hardware.chip import Fact
from rooftrace.hardware.systems import available_systems, load_system
from rooftrace.reporting.commands.pricing import check_groups
from rooftrace.reporting.commands.requests import StepRequest
from rooftrace.reporting.commands.sweeps import USUAL
from rooftrace.studies.solving import candidates, serving, workloads
from rooftrace.studies.sweeps import Form


def grounds_of(
    question: Question,
    forms: Mapping[str, Form],
    *,
    counts: Collection[int] = (),
    first: Sequence[str] = (),
) -> Iterator[str]:
    """The grounds of an answer, in sentences.

    forms: of the step, by the chips that it is on.  counts: numbers of chips that were tried, of an
    answer that chooses.  first: chips whose prices come first.
    """
    service, chips = question.service, tuple(question.chips)
    models = ", ".join(dict.fromkeys(c.execution.name for c in question.conditions))
    yield f"execution {models}; {_knobs(question)}"
    if any(count > 1 for count in counts):
        yield (
            "several chips: the step of one of them, traced over a mesh; "
            f"{'; '.join(dict.fromkeys(map(_joined, chips)))}"
        )
    if counts:
        yield "one copy of the model; n copies answer n times as many requests as fast"
    meshed = question.counts is not None or question.job.request.mesh or question.form is not None
    if counts and not meshed:
        more = "" if question.find not in WORDS else (
            ", and twice as many where these could be 10 % better if they sent nothing"
        )  # fmt: skip
        yield f"as few chips as hold the limits{more}; --chips 1,2,4,8 names others"
    if service.mix is not None:
        yield (
            f"decode steps with the mean cache of the requests, {service.mix.kv:,} tokens; "
            "memory too"
        )
        where = "on chips of their own" if service.apart else "in the decode steps"
        yield f"prefills {where}; each client sends one request once the one before is answered"
    if service.apart:
        yield from _pools(question)
    if service.prefills is not None:
        chips = (*chips, service.prefills)
    priced = [c for c in chips if c.price is not None and question.find in ("cheapest", "chips")]
    ranks = {name: rank for rank, name in reversed(list(enumerate(first)))}
    priced.sort(key=lambda c: ranks.get(c.name, len(ranks)))
    for chip in priced[:3]:
        assert chip.price is not None
        yield f"price of {chip.name}: {chip.price.text} ({chip.price.source})"
    if len(priced) > 3:
        yield f"prices of the other {len(priced) - 3} chips: rooftrace chips show NAME"
    if question.find == "energy":
        yield from dict.fromkeys(filter(None, map(power_words, chips)))
    proven: dict[str, list[str]] = {}
    for whose, form in forms.items():
        for line in form.where():
            proven.setdefault(line, []).append(whose)
    for line, all_of in list(proven.items())[:3]:
        of = f" on {', '.join(all_of)}" if len(all_of) < len(forms) else ""
        yield f"formulas proven for {line}{of}"
    if any(r.form.example.unrecorded for form in forms.values() for r in form.regimes):
        yield "a part of the step ran out of sight of the trace: times and memory are too low"


def _pools(question: Question) -> Iterator[str]:
    """How the pools of prefill and decode are joined."""
    other = question.service.prefills
    if other is not None:
        yield f"prefills on as many {other.name} together as decode steps on {_names(question)}"
    yield "chips of both pools in the ratio in which neither waits; dollars and joules count both"
    for chip in question.chips:
        rates = [candidates.out_of_node(each) for each in (chip, other or chip)]
        known = [rate for rate in rates if rate is not None]
        if len(known) < len(rates):
            yield f"{chip.name}: no network is known; the time to send a cache is not counted"
        else:
            rate = units.format_bandwidth(min(known))
            yield f"a cache is sent to {chip.name} at {rate}: the datasheet's, without latency"


def _names(question: Question) -> str:
    return ", ".join(chip.name for chip in question.chips)


def power_words(chip: Chip) -> str:
    """The power of a chip that energy is counted with, and its source; "" where unknown."""
    drawn, system = chip.drawn, chip.system
    if drawn is None:
        return ""
    of = "alone, as no power of its node is given"
    if drawn.source == "as asked for":
        of = "and its share of the node"
    elif system is not None and system.power is not None:
        of = f"and its share of {system.name}"
    cooled = "cooling of the building apart; --pue"
    if "PUE " in drawn.note:
        cooled = f"{drawn.note}: {drawn.value:,.4g} W"
    return f"power of {chip.name} {of}: {drawn.text} all the time ({drawn.source}); {cooled}"


def _joined(chip: Chip) -> str:
    """The network of chips of a kind, in words."""
    if chip.system is not None:
        return f"joined as {chip.system.name}"
    return "joined by the datasheet's link, at any number of them; a --system has fitted times"


def _knobs(question: Question) -> str:
    model = question.conditions[0].execution
    titles = [knobs.title for c in question.chips if (knobs := model.knobs_on(c)) is not None]
    if not titles:
        return "times are bounds: peaks of the datasheet, which real kernels miss"
    rest = "" if isinstance(model.knobs, Knobs) else ", not calibrated"
    borrowed = dict.fromkeys(model.borrowed_on(chip) for chip in question.chips)
    by = f"times by {', '.join(dict.fromkeys(titles))}{rest}"
    return "; ".join(filter(None, (by, *borrowed)))


# -- questions -------------------------------------------------------------------------------------

OTHERS = ("rates", "passing", "chips")
"""Values of `find` besides sizes and objectives."""
WORDS = (*(name for name in serving.OBJECTIVES if name != "largest"), *OTHERS)


@dataclass(frozen=True, kw_only=True)
class Question(StepRequest):
    """A question: the size or objective, in which steps, on which chips."""

    find: str  # a size, of which the largest is looked for, an objective, or one of OTHERS
    values: Sequence[int] | None  # of the open size
    limits: workloads.Limits
    service: candidates.Service
    counts: tuple[int, ...] | None
    at: Mapping[str, int]  # other sizes of a saved form
    most: int

    @property
    def open(self) -> str:
        """The name of the open size."""
        if self.find == "passing":
            return "kv"
        return "batch" if self.find in WORDS else self.find


def settled(question: Question, form: Form) -> Question:
    """The question with the execution that fits the phase, where it names none."""
    check_groups(lambda: [form.example] if form.regimes else [], question.models)
    pricing = question.pricing
    if pricing.execution is not None or form.phase in ("prefill", "decode"):
        return question
    return replace(question, models=tuple(pricing.executions(usual_execution(question.job))))


_EXAMPLES = {
    "second": "a time, for example 30 ms",
    "byte/s": "a bandwidth, for example 2 TB/s",
    "count": "a number, for example 15T",
}


def amount_of(name: str, value: float | str, unit: str = "second") -> float:
    """A number above 0, or that of a text such as "30 ms".  Raises RequestError for another."""
    try:
        number = units.parse(value, unit) if isinstance(value, str) else float(value)
        if not 0 < number < math.inf:
            raise ValueError(value)
    except (TypeError, ValueError):
        raise RequestError(f"{name} {value!r}: expected {_EXAMPLES[unit]}") from None
    return number


def over_of(over: Any, find: str) -> tuple[str, Any]:
    if isinstance(over, Mapping):
        if len(over) != 1:
            raise RequestError(
                f"over {', '.join(map(str, over))}: one size is left open; fix the others"
            )
        ((name, values),) = over.items()
        return str(name), values
    return find, over


def counts_of(chips: int | Sequence[int]) -> tuple[int, ...]:
    counts = (chips,) if isinstance(chips, int) else tuple(sorted(set(chips)))
    if not counts or min(counts) < 1:
        raise RequestError(f"chips {chips!r}: expected numbers from 1")
    return counts


def limits_of(
    step: float | str | None, tpot: float | str | None, ttft: float | str | None
) -> workloads.Limits:
    """The limits on times."""
    named = {"step": step, "tpot": tpot, "ttft": ttft}
    return workloads.Limits(**{n: amount_of(n, v) for n, v in named.items() if v is not None})


def service_of(
    mix: str | workloads.Mix | None, apart: bool, kept_free: float, prefills: Chip | None = None
) -> candidates.Service:
    """How requests are served."""
    if not 0 <= kept_free < 1:
        raise RequestError(f"kept_free {kept_free:g}: expected a share from 0 to below 1")
    requests = workloads.Mix.of(mix) if isinstance(mix, str) else mix
    return candidates.Service(mix=requests, apart=apart, prefills=prefills, kept_free=kept_free)


def prefill_chip_of(name: Any, apart: bool) -> tuple[Chip, ...]:
    """The chip of prefills that run on others, by its name or that of its system; () for None."""
    if name is None:
        return ()
    if not apart:
        raise RequestError(f"prefill_chip {name}: it is for prefills that run apart (--apart)")
    if isinstance(name, str) and name in available_systems():
        return (load_system(name).joined_chip,)
    return (load_chip(name),)


def with_costs(
    chips: Sequence[Chip], price: Any = None, power: Any = None, pue: float | None = None
) -> tuple[Chip, ...]:
    """Chips with the prices and powers of a request; those of nodes too."""
    if pue is not None and not 1 <= pue < math.inf:
        raise RequestError(f"pue {pue!r}: expected a factor of at least 1")
    prices, powers = numbers_of("price", price, chips), numbers_of("power", power, chips)
    return tuple(_with_pue(with_numbers(each, prices, powers), pue) for each in chips)


def _with_pue(chip: Chip, pue: float | None) -> Chip:
    """The chip with the power of its node, or else its own, of the building with it."""
    node = None if chip.system is None else chip.system.power
    power = node or chip.power
    if pue is None or power is None:
        return chip
    note = "; ".join(filter(None, (power.note, f"PUE {pue:g}")))
    power = replace(power, value=power.value * pue, note=note)
    if node is None:
        return replace(chip, power=power)
    return replace(chip, system=replace(chip.system, power=power))


OF_ALL = ("cheapest", "chips")
"""Values of `find` that look at all chips, where none is named."""


def all_chips(find: str) -> list[Chip]:
    """The GPUs that come along; for "cheapest", those with a price."""
    loaded = map(load_chip, available_chips())
    return [c for c in loaded if c.kind == "gpu" and (c.price is not None or find == "chips")]


def numbers_of(name: str, values: Any, chips: Sequence[Chip]) -> Mapping[str, float]:
    """Numbers by name of a chip, of one for all or of a mapping."""
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        values = {c.name: values for c in chips}
    names = {alias: c.name for c in chips for alias in (c.name, *c.aliases)}
    numbers = {}
    for chip, value in values.items():
        if chip not in names:
            raise RequestError(
                f"{name} of {chip!r}: no chip of this question{hint(chip, list(names))}"
            )
        if not value > 0:
            raise RequestError(f"{name} of {chip}: {value!r}: expected a number above 0")
        numbers[names[chip]] = float(value)
    return numbers


def with_numbers(chip: Chip, prices: Mapping[str, float], powers: Mapping[str, float]) -> Chip:
    changed: dict[str, Any] = {}
    for name, unit, values in (("price", "dollar/hour", prices), ("power", "watt", powers)):
        if chip.name in values:
            value = values[chip.name]
            changed[name] = Fact(value, f"{value:g} {unit}", "as asked for", "measured")
    if "power" in changed and chip.system is not None:
        changed["system"] = replace(chip.system, power=None)
    return replace(chip, **changed) if changed else chip


_OF_COMMANDS = ("mesh", "scaling", "run", "critical-batch")
"""What `rooftrace solve` finds by functions of their own (`rt.tools.best_mesh`, `explore` ...)."""


def check(question: Question) -> None:
    """Raise RequestError for a question that contradicts itself."""
    find, service, limits, job = question.find, question.service, question.limits, question.job
    names = ", ".join(c.name for c in question.chips)
    if find == "cheapest" and not any(c.price for c in question.chips):
        raise RequestError(f"find cheapest: no price is known of {names}; give one with price=")
    if find == "energy" and not any(c.drawn for c in question.chips):
        raise RequestError(f"find energy: no power is known of {names}; give one with power=")
    if limits.ttft is not None and service.mix is None:
        raise RequestError(
            f"ttft {limits.ttft:g} s: it is of prompts; give them with mix=, as 2048:256"
        )
    if service.apart and service.mix is None:
        raise RequestError("apart: it is for the prefills of a mix; give one with mix=")
    opened = question.open
    if service.mix is not None and opened != "batch":
        raise RequestError(f"mix: it says how long caches are; {opened} cannot be open beside")
    if service.mix is not None and question.form is not None:
        raise RequestError("mix: a saved form has one phase and no prefill; name the model itself")
    if service.mix is not None and job.request.kv is not None:
        raise RequestError("kv: the mix says how long caches are; leave one of them out")
    if question.counts is not None:
        job.refuse(("mesh",), "chips= splits the step over meshes; leave one of them out")
    if opened in job.explicit and not (find in OTHERS and opened == "batch"):
        job.refuse((opened,), "it is what is looked for; leave it out, or say its values with over")
    if find in OTHERS:
        for name, value in limits:
            raise RequestError(f"{name} {value:g} s: find {find} takes no limit")
    words = (*serving.OBJECTIVES, *OTHERS)
    if find not in words and find not in USUAL and "." not in find and question.values is None:
        raise RequestError(
            f"find {find!r}: expected a size ({', '.join(USUAL)}, or another one with its values "
            f"in over=) or one of {', '.join(words)}; a command also takes --find "
            f"{', '.join(_OF_COMMANDS)}{hint(find, (*words, *USUAL, *_OF_COMMANDS))}"
        )


def sizes_of_form(
    form: Form | None, at: Mapping[str, int] | None, named: Mapping[str, Any]
) -> tuple[dict[str, int], dict[str, Any]]:
    """(fixed sizes of a saved form, from `at` and from named arguments; the other arguments)."""
    if form is None:
        if at:
            raise RequestError(
                f"at={dict(at)}: it is for a saved form; say sizes as batch=8, kv=4096"
            )
        return {}, dict(named)
    sizes = {n: v for n, v in named.items() if n in form.names and v is not None}
    return {**(at or {}), **sizes}, {n: v for n, v in named.items() if n not in sizes}
