"""The command `sweep`: a step over ranges of its sizes, on each chip, from a handful of traces."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import click

from rooftrace._formats import TEXTS
from rooftrace.errors import RequestError
from rooftrace.reporting.cli.options import (
    TARGET_HELP,
    chips_option,
    executions_option,
    plot_option,
    pricing_options,
    timeline_option,
    workload_options,
)
from rooftrace.reporting.cli.output import complain, say
from rooftrace.reporting.cli.outputs import Output
from rooftrace.reporting.cli.shared import (
    alternatives,
    load_chips,
    load_executions,
    load_rules,
    one_phase,
    pairs,
    progress,
    setting,
    workload,
    write_result,
    write_timeline,
)

_HELP = f"""{TARGET_HELP}  Or a form that `--save-form` wrote, which needs no torch.

--over NAME=VALUES: 1..1024, 1..1024:8 (steps), 2048..131072:x2 (doubling), 1,2,4, or the name
alone for its usual range.  NAME: batch, seq, kv, a number of the config (config.hidden_size), a
keyword of the function that TARGET names, or a name in the shape of an --input."""


@click.command(epilog=_HELP)
@click.argument("targets", metavar="TARGET...", nargs=-1, required=True)
@click.option(
    "--over",
    "over",
    multiple=True,
    required=True,
    metavar="NAME[=VALUES]",
    help="A size and its values.  Repeatable.",
)
@click.option(
    "--vary",
    multiple=True,
    metavar="NAME=VALUES",
    help="Several values of a field of the config (config.num_experts_per_tok=2,4,8) or of a "
    "keyword; each is traced by itself.  Repeatable.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="A field of the config, or a keyword of the function that TARGET names.  Repeatable.",
)
@workload_options
@pricing_options
@chips_option()
@executions_option()
@click.option(
    "-o",
    "--out",
    type=Output(folder=True, table=True),
    metavar="FILE",
    help="Write the table there: .parquet or .csv; for several TARGETs a folder.  A stopped sweep "
    "goes on with the same command.",
)
@plot_option("Draw time over the first size.")
@timeline_option
@click.option(
    "--save-form",
    type=Output(),
    metavar="FILE",
    help="Write the form, to sweep it again without torch.",
)
@click.option(
    "--most", type=int, default=100, show_default=True, help="Traces of one form at most."
)
@click.option(
    "--scheduler",
    metavar="ADDRESS",
    help="Of Dask (tcp://...), for many TARGETs; default: processes of this machine.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["terminal", *TEXTS]),
    default="terminal",
    show_default=True,
)
def sweep(targets: tuple[str, ...], form: str, plot: str | None, **asked: Any) -> None:
    """What a step of TARGET costs over ranges of its sizes: best, limits, cliffs, a table."""
    if len(targets) > 1 or asked["scheduler"] is not None:
        _fleet(targets, asked, form, plot)
        return
    del asked["scheduler"]
    _one(targets[0], asked, form, plot)


def _one(target: str, asked: dict[str, Any], form: str, plot: str | None) -> None:
    import rooftrace as rt

    out, saved, timeline = asked.pop("out"), asked.pop("save_form"), asked.pop("timeline")
    if saved is not None and asked["vary"]:
        raise RequestError(
            "--save-form with --vary: each value has a form of its own; leave one out"
        )
    options = _options(asked)
    with progress(kept=_FIRST):
        try:
            result = rt.sweep(target, out=out, **options)
        except KeyboardInterrupt:
            if out is not None:
                complain(f"stopped; what is done is in {out}.parts, the same command goes on")
            sys.exit(130)
        if saved is not None:
            rt.save_form(result.cases[0].form, saved)
        if plot is not None:
            rt.plot_sweep(result, plot)
    _say(result, form)
    if form == "terminal":
        for path, word in ((out, "written"), (saved, "form written"), (plot, "drawn")):
            if path is not None:
                say(f"\n{word} to {path}")
    write_timeline(timeline, result, quiet=form != "terminal")


def _say(result: Any, form: str) -> None:
    write_result(result, form, None, table=lambda: str(result.frame().to_csv(index=False)))


def _options(asked: dict[str, Any]) -> dict[str, Any]:
    """Options as `rt.sweep` takes them."""
    asked = dict(asked)
    load_rules(asked.pop("rules"))
    executions = load_executions(
        asked.pop("executions"), asked.pop("tf32"), asked.pop("knobs"), asked.pop("rewrites")
    )
    vary = pairs("--vary", asked.pop("vary"), _SETTING)
    settings = pairs("--set", asked.pop("settings"), _SETTING)
    named = {
        "over": _over(asked.pop("over")),
        "vary": {name: _values(text) for name, text in vary},
        "settings": {name: setting(text) for name, text in settings},
        "chip": load_chips(asked.pop("chips")),
        "execution": executions,
        "phase": one_phase(asked.pop("phases")),
        "dtype": alternatives(asked.pop("dtype")),
        "kv_dtype": alternatives(asked.pop("kv_dtype")),
        "most": asked.pop("most"),
    }
    if not named["settings"]:
        del named["settings"]
    return {**workload(**asked), **named}


def _over(texts: Sequence[str]) -> dict[str, str | None]:
    over: dict[str, str | None] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if equals and not values:
            raise RequestError(f"--over {text}: the range is empty; for example {name}=1..64")
        over[name.strip()] = values if equals else None
    return over


_SETTING = "NAME=VALUE, for example config.num_hidden_layers=8"


def _values(text: str) -> list[Any]:
    return [setting(part) for part in text.split(",") if part]


def _fleet(targets: Sequence[str], asked: dict[str, Any], form: str, plot: str | None) -> None:
    """Several targets, or work for a scheduler: results land in a folder as they come."""
    import rooftrace as rt

    several = f"{len(targets)} TARGETs" if len(targets) > 1 else "--scheduler"
    single = {name: asked.pop(name) for name in ("save_form", "timeline")}
    refused = {"--plot": plot, "--save-form": single["save_form"], "--timeline": single["timeline"]}
    for option, value in refused.items():
        if value is not None:
            raise RequestError(
                f"{option} {value}: it is for one TARGET without --scheduler; here: {several}"
            )
    out, scheduler, rules = asked.pop("out"), asked.pop("scheduler"), asked["rules"]
    if out is None:
        raise RequestError(f"{several}: say where results land with -o FOLDER")
    options = _options(asked)  # what is wrong with the request is said before any worker starts
    with progress(kept=_ENDED):
        try:
            result = rt.sweep_fleet(targets, out=out, scheduler=scheduler, rules=rules, **options)
        except KeyboardInterrupt as stop:
            complain(str(stop) or "stopped")
            sys.exit(130)
    _say(result, form)
    if form == "csv":
        for failure in result.failures:
            complain(f"{failure.title} failed: {failure.error}")
    if result.failures:
        sys.exit(1)


_FIRST = re.compile(r"first step, .*")
"""What a sweep tells early, and that stays on stderr."""
_ENDED = re.compile(r"\d+ of \d+( are there|: .*)|waiting for workers.*|.*: its workers died.*")
"""What a fleet tells that stays on stderr."""
