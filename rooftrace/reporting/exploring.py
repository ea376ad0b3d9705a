"""Explorations of any source: its decode step as a form, then where computing can limit it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rooftrace._progress import tell, telling
from rooftrace.costmodels.exploring import formsteps
from rooftrace.costmodels.sweeping import Form
from rooftrace.errors import RequestError, UnusedError, hint
from rooftrace.hardware.units import UnitError, parse
from rooftrace.reporting.estimates import Source
from rooftrace.reporting.requests import StepRequest
from rooftrace.reporting.requests.calls import conditions_of
from rooftrace.reporting.requests.options import taken
from rooftrace.reporting.requests.pricing import PLAIN, PricingOptions
from rooftrace.reporting.requests.questions import ExploreArguments
from rooftrace.reporting.stepforms import form_of, known_form, level_values
from rooftrace.tracer.asking import Job

DEVICES = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (2048, 4096, 8192, 16384)
_MOST_BATCH = 16_384
NAMES = ("devices", "kv", "batch")


def explore(
    source: Source,
    *args: Any,
    plot: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> formsteps.Exploration:
    """Whether any batch makes a decode step limited by computing, over devices and cache lengths.

    source: a target, or a `Form` (or the file of one) over batch and kv.  over: values of devices
    that share the routed experts (default 1 to 64), of kv (default 2048 to 16384), and of batch, of
    one device (default: powers of 2, then every number).  alpha: the share of the slower of HBM and
    link at which computing counts as the limit.  link: byte/s, or "50 GB/s"; default: the chip's
    fastest.  plot: a PNG.  FLOPs and bytes are those of estimates; other arguments as of `trace`.

    Raises RequestError for a name or values that there are not, ExploreError for devices without
    routed experts, and what `form` raises.
    """
    own, kwargs = taken(ExploreArguments, kwargs)
    levels = _levels(own.over)
    bandwidth = _bandwidth(own.link)
    pricing, sizes = PricingOptions.parted(kwargs)
    _check_bounds(pricing)
    known = known_form(source)
    if known is not None:
        models, (used,) = conditions_of(explore, pricing, source)
        for name in ("dtype", "weights_dtype", "kv_dtype"):
            sizes.pop(name, None)
        (conditions,) = pricing.conditions(models)
    else:
        asked = StepRequest.of(explore, source, args, {**kwargs, "phase": "decode"})
        used, (conditions,) = asked.chip, asked.conditions
        asked.job.refuse(("seq",), "a decode step has the lengths of its cache; say them with over")
        asked.job.refuse(NAMES, "its values are those of `over`; leave it out")
    with telling(progress):
        if known is None:
            form, fixed = _formed(asked.job, levels), {}
        else:
            form, fixed = known, _fixed(known, sizes)
        tell("exploring")
        result = formsteps.explore_form(
            form,
            conditions,
            used,
            devices=levels["devices"],
            kv=levels["kv"],
            batches=levels.get("batch"),
            alpha=own.alpha,
            link=bandwidth,
            fixed=fixed,
        )
    if plot is not None:
        from rooftrace.reporting.figures import ofsizes, style

        style.save(lambda: ofsizes.exploration_plot(result), Path(plot))
    return result


def _check_bounds(pricing: PricingOptions) -> None:
    """Raise RequestError for what an exploration has no use for: it is at rates of datasheets."""
    asked = {name: getattr(pricing, name) for name in _OF_RATES}
    for name, value in asked.items():
        if value != getattr(PLAIN, name):
            raise UnusedError(name, f"{value}", _OF_DATASHEETS)
    for name, value in (pricing.factors or {}).items():
        if name.partition(".")[0] in _RATES:
            raise UnusedError("settings", f"{name}={value}", _OF_DATASHEETS)


_OF_DATASHEETS = "an exploration is of one device at the rates of its datasheet; leave it out"
_OF_RATES = ("knobs", "what_if", "exchange")
_RATES = ("knobs", "utilization", "disturbances", "exchange")
"""Fields of executions that times alone depend on."""


def _levels(over: Mapping[str, Any] | None) -> dict[str, Sequence[int]]:
    levels: dict[str, Sequence[int]] = {"devices": DEVICES, "kv": LENGTHS}
    for name, values in (over or {}).items():
        if name not in NAMES:
            raise RequestError(f"over {name!r}: expected {', '.join(NAMES)}{hint(name, NAMES)}")
        levels[name] = tuple(level_values(name, values))
    return levels


def _bandwidth(link: str | float | None) -> float | None:
    if isinstance(link, str):
        try:
            link = parse(link, "byte/s")
        except UnitError as error:
            raise RequestError(f"link={error}") from None
    if link is not None and not 0 < link < float("inf"):
        raise RequestError(f"link={link!r}: expected byte/s above 0, or as '50 GB/s'")
    return link


def _formed(job: Job, levels: Mapping[str, Sequence[int]]) -> Form:
    """The form over all batches of a device and one twice as large, and all lengths."""
    most = max(levels.get("batch", (_MOST_BATCH,)))
    batches = range(1, 2 * most + 1)
    lengths = levels["kv"]
    return form_of(job, {"batch": batches, "kv": range(min(lengths), max(lengths) + 1)})


def _fixed(form: Form, sizes: Mapping[str, Any]) -> dict[str, int]:
    """The other sizes of a form, by name."""
    for name in ("batch", "kv"):
        if name not in form.names:
            raise RequestError(f"{form.title}: the form is not over {name}: expected batch and kv")
    numbers = form.numbers({**sizes, "batch": 1, "kv": 1})
    named = dict(zip(form.names, numbers, strict=True))
    return {name: size for name, size in named.items() if name not in ("batch", "kv")}
