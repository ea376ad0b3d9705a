"""The forms that a question is answered with: of the step with one size open, and of prefills."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rooftrace._progress import tell
from rooftrace.costmodels.sweeping import Form
from rooftrace.errors import RequestError, hint
from rooftrace.reporting.questions import Question
from rooftrace.reporting.stepforms import decoding_first, form_of, level_values
from rooftrace.tracer.asking import Job

BATCHES = range(1, 4097)
"""Batches that are looked at where none are asked for."""
_EVERY = 512
_A_DOUBLING = 128
"""Sizes that are tried first: every one to the first number, then so many for each doubling."""


def open_form(asked: Question) -> Form:
    """The form over the size that is left open."""
    if asked.known is not None:
        return asked.known
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


def prefill_form(asked: Question) -> Form:
    """The prefill of one prompt, traced at each length by itself."""
    from rooftrace.tracer.sizing import SizedSource

    request = replace(asked.job.request, batch=1, kv=None)
    job = replace(asked.job, phases=("prefill",), request=request, explicit=())
    sized = SizedSource(job, ("seq",))

    def trace(numbers: tuple[int, ...]) -> Any:
        tell(f"tracing the prefill of {numbers[0]:,} tokens")
        return sized.graphs(numbers)["prefill"]

    return Form(title=asked.job.name, phase="prefill", names=("seq",), regimes=(), trace=trace)


def fixed_sizes(asked: Question, form: Form) -> dict[str, int]:
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
