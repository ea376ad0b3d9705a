"""The command sensitivity: elasticities of a step, or the effects of a full factorial grid."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from rooftrace.errors import RequestError
from rooftrace.reporting.cli.options import (
    TARGET_HELP,
    Commas,
    chip_option,
    execution_option,
    plot_option,
    pricing_options,
    table_options,
    timeline_option,
    workload_options,
)
from rooftrace.reporting.cli.output import say
from rooftrace.reporting.cli.outputs import Output
from rooftrace.reporting.cli.shared import (
    load_executions,
    load_rules,
    one_phase,
    pairs,
    progress,
    workload,
    write_result,
    write_timeline,
)

_HELP = f"""{TARGET_HELP}  Or a form that `rooftrace sweep --save-form` wrote.

--grid NAME=V1,V2: batch, seq, kv; config.FIELD, or a keyword of the function that TARGET names;
chip, execution, dtype, weights_dtype, kv_dtype; a number of the chip (chip.memory_bandwidth,
chip.matrix.bf16, chip.link.intra.bandwidth; chip.matrix is all of them) or a knob
(knobs.share.mm.memory, execution.weight_residency).  Values are numbers, quantities ("4.8 TB/s") or
factors (x0.5).  NAME+NAME=x0.5,x1 changes both together."""


@click.command(epilog=_HELP)
@click.argument("target")
@click.option(
    "--over",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="A size to look at, and its value; default: batch, and kv or seq.  Repeatable.",
)
@click.option(
    "--grid",
    multiple=True,
    metavar="NAME=V1,V2,...",
    help="A factor and its levels: every combination is priced.  Repeatable.",
)
@click.option(
    "--of",
    "response",
    metavar="RESPONSE",
    help="With --grid, what effects are of: t_est (default), t_bound, t_comp, t_hbm, t_net, flops, "
    "bytes_hbm, peak_memory, items_per_s.",
)
@click.option("--log", is_flag=True, help="With --grid: effects in factors, not in sums.")
@click.option(
    "--points",
    type=Output(table=True),
    metavar="FILE.csv",
    help="With --grid: write every point there.",
)
@workload_options
@pricing_options
@chip_option()
@execution_option()
@plot_option("Draw a tornado.")
@timeline_option
@table_options
def sensitivity(
    target: str, form: str | None, out: str | None, points: str | None, timeline: str | None,
    **asked: Any,
) -> None:  # fmt: skip
    """What moves a step of TARGET most: its sizes, facts of the chip, knobs; or factors of a grid.

    Without --grid: elasticities of FLOPs, bytes, memory and time, ranked, and finite steps that
    show cliffs.  With it: main effects and interactions of pairs, as shares of the variance.
    """
    import rooftrace as rt
    from rooftrace._writing import write_bytes

    if points is not None and not asked["grid"]:
        raise RequestError(f"--points {points}: it is of a grid; name some factors with --grid")
    if timeline is not None and asked["grid"]:
        raise RequestError(
            f"--timeline {timeline}: a grid is many steps; leave --grid out for the timeline of one"
        )
    plot, options = asked["plot"], _options(asked)
    with progress():
        result: Any = rt.sensitivity(target, **options)
    if points is not None:
        write_bytes(Path(points), result.frame().to_csv(index=False).encode())
    shown = write_result(result, form, out)
    if shown:
        for path, word in ((plot, "drawn"), (points, "points written")):
            if path is not None:
                say(f"\n{word} to {path}")
    told = ("over", "grid", "log", "phase", "plot", "response")
    asked = {name: value for name, value in options.items() if name not in told}
    write_timeline(timeline, result, quiet=not shown, source=target, **asked)


def _options(asked: dict[str, Any]) -> dict[str, Any]:
    """Options as `rt.sensitivity` takes them."""
    asked = dict(asked)
    load_rules(asked.pop("rules"))
    changes = (asked.pop("tf32"), asked.pop("knobs"), asked.pop("rewrites"))
    (execution,) = load_executions([asked.pop("execution")], *changes)
    response = asked.pop("response")
    named = {
        "over": _over(asked.pop("over")),
        "grid": _grid(asked.pop("grid"), changes),
        "log": asked.pop("log"),
        "chip": asked.pop("chip"),
        "execution": execution,
        "phase": one_phase(asked.pop("phases")),
        "plot": asked.pop("plot"),
        **({} if response is None else {"response": response}),
    }
    return {**workload(**asked), **named}


def _over(texts: Sequence[str]) -> dict[str, int | None] | None:
    if not texts:
        return None
    over: dict[str, int | None] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            over[name.strip()] = int(value.replace("_", "")) if equals else None
        except ValueError:
            raise RequestError(
                f"--over {text}: expected a whole number, for example {name}=64"
            ) from None
    return over


def _grid(texts: Sequence[str], changes: tuple[Any, ...]) -> dict[str, Any] | None:
    """Levels by factor; executions with what --tf32, --knobs and --rewrite change."""
    if not texts:
        return None
    levels: dict[str, Any] = {}
    for name, values in pairs("--grid", texts, "NAME=V1,V2, for example batch=1,8,64"):
        if name in levels:
            raise RequestError(
                f"--grid {name}={values}: {name} stands twice; give all of its levels once"
            )
        levels[name] = values
        if name == "execution" and values.strip(", "):
            levels[name] = load_executions(Commas().convert(values, None, None), *changes)
    return levels
