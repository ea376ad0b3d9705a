"""The command solve: the best size, chip or rate within limits, with its margin and its grounds."""

from __future__ import annotations

from typing import Any

import click

import rooftrace as rt
from rooftrace.errors import RequestError
from rooftrace.reporting.cli.asking import asks
from rooftrace.reporting.cli.options import TARGET_HELP
from rooftrace.reporting.cli.shared import progress
from rooftrace.reporting.cli.written import Written, results

_HELP = f"""{TARGET_HELP}  Or a form that `rooftrace sweep --save-form` wrote.

--find SIZE: the largest batch, kv, seq (or another size, with its values in --over) within the
limits.  cheapest, energy, throughput, latency: the best deployment within them.  rates: the HBM
bandwidth, FLOP rate and link at which computing would limit.  passing: the length at which
attention takes longer than the MLP.  chips: how many by capacity.  mesh: which mesh of --chips
chips of a --system has most items per chip of those that fit (sizes of the axes that --mesh names).
scaling: the step on 1 to 1,024 chips, with the batch of a chip kept and with that of all."""


@click.command(epilog=_HELP)
@click.argument("target")
@asks(
    "solve",
    chip="Chips by name or TOML path; default: h200-sxm, for cheapest all with a price.",
    execution="naive, eager, compiled, mixed, efficient, serving, seed-naive, seed-efficient; "
    "default: serving for prefill and decode, else efficient.",
)
@results("data", plot="Draw speed of a user against speed of a chip.", timeline=True)
def solve(target: str, written: Written, asked: dict[str, Any]) -> None:
    """The largest batch, the cheapest chips, the rate or the length that holds: with margins."""
    find = asked.get("find", "batch")
    if written.timeline is not None and find in _WITHOUT_STEP:
        raise RequestError(
            f"--timeline {written.timeline} with --find {find}: its answer is no step that a "
            "timeline could show; leave it out"
        )
    with progress():
        if find in _MESHES:
            result = getattr(rt, _MESHES[find])(target, **_meshed(find, asked))
        else:
            result = rt.solve(target, **asked)
        if written.plot is not None:
            rt.plot_answer(result, written.plot)
    written.write(result)
    if getattr(result, "rows", True) == ():
        raise click.exceptions.Exit(1)


_WITHOUT_STEP = ("rates", "passing", "chips", "mesh", "scaling")
_MESHES = {"mesh": "best_mesh", "scaling": "scaling"}
_FOR_SERVICE = ("ttft", "mix", "apart", "power")


def _meshed(find: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Options as `rt.best_mesh` and `rt.scaling` take them.  Raises RequestError for others."""
    for name in (*_FOR_SERVICE, *(("over", "step", "tpot") if find == "scaling" else ())):
        if name in asked:
            raise RequestError(f"--{name} with --find {find}: it has no use for it; leave it out")
    if find == "mesh" and "chips" not in asked:
        raise RequestError("--find mesh: say how many chips, as --chips 64")
    return {name: value for name, value in asked.items() if name != "find"}
