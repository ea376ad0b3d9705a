"""The command solve: the best size, chip or rate within limits, with its margin and its grounds."""

from __future__ import annotations

from typing import Any

import click

import rooftrace as rt
from rooftrace.costmodels.execution import TYPICAL
from rooftrace.errors import RequestError
from rooftrace.reporting.cli.options import (
    EXECUTIONS,
    TARGET_HELP,
    Commas,
    output_options,
    plot_option,
    pricing_options,
    timeline_option,
    workload_options,
)
from rooftrace.reporting.cli.output import say
from rooftrace.reporting.cli.shared import (
    alternatives,
    load_chips,
    load_executions,
    load_rules,
    one_phase,
    progress,
    workload,
    write_result,
    write_timeline,
)

_HELP = f"""{TARGET_HELP}  Or a form that `rooftrace sweep --save-form` wrote.

--find SIZE: the largest batch, kv, seq (or another size, with its values in --over) within the
limits.  cheapest, energy, throughput, latency: the best deployment within them.  rates: the HBM
bandwidth, FLOP rate and link at which computing would limit.  passing: the length at which
attention takes longer than the MLP.  chips: how many by capacity.  mesh: which mesh of --chips
chips of a --system has most items per chip of those that fit (sizes of the axes that --mesh names).
scaling: the step on 1 to 1,024 chips, with the batch of a chip kept and with that of all."""


@click.command(epilog=_HELP)
@click.argument("target")
@click.option(
    "--find",
    default="batch",
    show_default=True,
    metavar="WHAT",
    help="A size, cheapest, energy, throughput, latency, rates, passing, chips, mesh, scaling.",
)
@click.option("--tpot", metavar="TIME", help="Limit: time per output token, for example 30ms.")
@click.option(
    "--ttft", metavar="TIME", help="Limit: time to the first token of the longest prompt of --mix."
)
@click.option("--step", metavar="TIME", help="Limit: time of one step, of any phase.")
@click.option(
    "--mix",
    metavar="IN:OUT[@SHARE],...",
    help="Requests: tokens of prompt and output, with shares, for example 2048:256@3,8192:1024.",
)
@click.option("--apart", is_flag=True, help="Prefills run on chips of their own.")
@click.option(
    "--over", metavar="VALUES", help="Values of the size that is left open, for example 1..16384."
)
@workload_options
@pricing_options
@click.option(
    "--chip",
    "chip",
    type=Commas(),
    help="Chips by name or TOML path; default: h200-sxm, for cheapest all with a price.",
)
@click.option(
    "--system", help="How chips are joined, for mesh and scaling (rooftrace systems list)."
)
@click.option(
    "--chips",
    type=Commas(),
    metavar="N,...",
    help="How many chips together; default: as few as hold the limits; for scaling 1 to 1,024.",
)
@click.option(
    "--execution",
    "executions",
    type=Commas(),
    help=f"{EXECUTIONS}; default: serving for prefill and decode, else efficient.",
)
@click.option(
    "--price",
    multiple=True,
    metavar="[CHIP=]DOLLARS",
    help="Dollars per hour of a chip, in place of that of its file.  Repeatable.",
)
@click.option(
    "--power",
    multiple=True,
    metavar="[CHIP=]WATTS",
    help="Watts of a chip, in place of that of its file.  Repeatable.",
)
@click.option(
    "--kept-free",
    type=float,
    default=0.0,
    show_default=True,
    help="The share of the memory that stays free.",
)
@plot_option("Draw speed of a user against speed of a chip.")
@timeline_option
@output_options
def solve(
    target: str, form: str | None, out: str | None, plot: str | None, timeline: str | None,
    **asked: Any,
) -> None:  # fmt: skip
    """The largest batch, the cheapest chips, the rate or the length that holds: with margins."""
    if timeline is not None and asked["find"] in _WITHOUT_STEP:
        raise RequestError(
            f"--timeline {timeline} with --find {asked['find']}: its answer is no step that a "
            "timeline could show; leave it out"
        )
    options = _options(asked)
    with progress():
        find = options["find"]
        if find in _MESHES:
            result = getattr(rt, _MESHES[find])(target, **_meshed(options))
        else:
            result = rt.solve(target, **options)
        if plot is not None:
            rt.plot_answer(result, plot)
    shown = write_result(result, form, out)
    if shown and plot is not None:
        say(f"\ndrawn to {plot}")
    write_timeline(timeline, result, quiet=not shown)
    if getattr(result, "rows", True) == ():
        raise click.exceptions.Exit(1)


_WITHOUT_STEP = ("rates", "passing", "chips", "mesh", "scaling")
_MESHES = {"mesh": "best_mesh", "scaling": "scaling"}
_FOR_SERVICE = ("ttft", "mix", "apart", "power", "chip")


def _meshed(options: dict[str, Any]) -> dict[str, Any]:
    """Options as `rt.best_mesh` and `rt.scaling` take them.  Raises RequestError for others."""
    find = options.pop("find")
    refused = (*_FOR_SERVICE, *(("over", "step", "tpot") if find == "scaling" else ()))
    for name in refused:
        value = options.pop(name)
        if value:
            reason = "name a --system" if name == "chip" else "leave it out"
            raise RequestError(f"--{name} with --find {find}: it has no use for it; {reason}")
    if options["system"] is None:
        raise RequestError(f"--find {find}: name how chips are joined, as --system dgx-h100")
    if find == "mesh" and options["chips"] is None:
        raise RequestError("--find mesh: say how many chips, as --chips 64")
    options["phase"] = options["phase"] or "training"
    return options


def _options(asked: dict[str, Any]) -> dict[str, Any]:
    """Options as `rt.solve` takes them."""
    load_rules(asked.pop("rules"))
    phase = one_phase(asked.pop("phases"))
    named_models = asked.pop("executions")
    changes = (asked.pop("tf32"), asked.pop("knobs"), asked.pop("rewrites"))
    executions = None
    if named_models is not None or changes != (False, TYPICAL, ()):
        meshed = asked["find"] in ("mesh", "scaling")
        serves = phase in ("prefill", "decode") or (phase is None and not meshed)
        usual = "serving" if serves else "efficient"
        executions = load_executions(named_models or (usual,), *changes)
    chips, chip = asked.pop("chips"), asked.pop("chip")
    own = ("find", "tpot", "ttft", "step", "mix", "apart", "over", "kept_free")
    named = {name: asked.pop(name) for name in own}
    if asked["system"] is not None and named["find"] not in _MESHES:
        raise RequestError(f"--system {asked['system']}: it is for --find mesh and scaling; --chip")
    if named["find"] in _MESHES:
        named["system"] = asked.pop("system")
    else:
        del asked["system"]
    named |= {
        "execution": executions,
        "phase": phase,
        "dtype": alternatives(asked.pop("dtype")),
        "kv_dtype": alternatives(asked.pop("kv_dtype")),
        "chip": None if chip is None else load_chips(chip),
        "chips": None if chips is None else _counts(chips),
        "price": _numbers("--price", asked.pop("price")),
        "power": _numbers("--power", asked.pop("power")),
    }
    return {**workload(**asked), **named}


def _counts(texts: tuple[str, ...]) -> list[int]:
    try:
        return [int(text) for text in texts]
    except ValueError:
        raise RequestError(f"--chips {','.join(texts)}: expected numbers, as 1,2,4,8") from None


def _numbers(option: str, texts: tuple[str, ...]) -> Any:
    """One number for all chips, or numbers by chip."""
    if not texts:
        return None
    numbers: dict[str, float] = {}
    for text in texts:
        name, equals, value = text.rpartition("=")
        try:
            numbers[name] = float(value)
        except ValueError:
            raise RequestError(
                f"{option} {text}: expected a number, or CHIP=NUMBER, as h200-sxm=3.20"
            ) from None
        if not equals and len(texts) > 1:
            raise RequestError(f"{option} {text}: with several, say each as CHIP=NUMBER")
    return numbers.get("") if "" in numbers else numbers
