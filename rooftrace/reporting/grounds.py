"""What an answer rests on, in sentences."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from rooftrace.costmodels.knobs import Knobs
from rooftrace.costmodels.sweeping import Form
from rooftrace.hardware import Chip
from rooftrace.reporting.questions import WORDS, Question


def grounds_of(
    asked: Question, form: Form, *, counts: Collection[int] = (), first: Sequence[str] = ()
) -> Iterator[str]:
    """What an answer rests on, in sentences.

    counts: numbers of chips that were tried, of an answer that chooses.  first: chips whose prices
    are told first.
    """
    service = asked.service
    models = ", ".join(dict.fromkeys(c.execution.name for c in asked.conditions))
    yield f"execution {models}; {_knobs(asked)}"
    if any(count > 1 for count in counts):
        yield (
            "several chips: the step of one of them, traced over a mesh; "
            f"{'; '.join(dict.fromkeys(map(_joined, asked.chips)))}"
        )
    if counts and asked.counts is None and not asked.job.request.mesh and asked.form is None:
        more = "" if asked.find not in WORDS else (
            ", and twice as many where these could be 10 % better if they sent nothing"
        )  # fmt: skip
        yield f"as few chips as hold the limits{more}; --chips 1,2,4,8 names others"
    if service.mix is not None:
        yield (
            f"decode steps with the mean cache of the requests, {service.mix.kv:,} tokens; "
            "memory too"
        )
        where = "on chips of their own" if service.apart else "between the decode steps"
        yield f"prefills one by one {where}; no queue in the time to the first token"
    priced = [c for c in asked.chips if c.price is not None and asked.find in ("cheapest", "chips")]
    ranks = {name: rank for rank, name in reversed(list(enumerate(first)))}
    priced.sort(key=lambda c: ranks.get(c.name, len(ranks)))
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


def _joined(chip: Chip) -> str:
    """How chips of a kind are joined."""
    if chip.system is not None:
        return f"joined as {chip.system.name}"
    return "joined by the datasheet's link, at any number of them; a --system has fitted times"


def _knobs(asked: Question) -> str:
    model = asked.conditions[0].execution
    titles = [knobs.title for c in asked.chips if (knobs := model.knobs_on(c)) is not None]
    if not titles:
        return "times are bounds: peaks of the datasheet, which real kernels miss"
    rest = "" if isinstance(model.knobs, Knobs) else ", not calibrated"
    borrowed = dict.fromkeys(model.borrowed_on(chip) for chip in asked.chips)
    by = f"times by {', '.join(dict.fromkeys(titles))}{rest}"
    return "; ".join(filter(None, (by, *borrowed)))
