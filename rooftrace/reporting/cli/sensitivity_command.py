"""The command sensitivity: elasticities of a step, or the effects of a full factorial grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

import rooftrace as rt
from rooftrace.errors import RequestError
from rooftrace.reporting.cli.asking import asks
from rooftrace.reporting.cli.options import TARGET_HELP
from rooftrace.reporting.cli.output import say
from rooftrace.reporting.cli.outputs import Output
from rooftrace.reporting.cli.shared import progress
from rooftrace.reporting.cli.written import Written, results

_HELP = f"""{TARGET_HELP}  Or a form that `rooftrace sweep --save-form` wrote.

--grid NAME=V1,V2: batch, seq, kv; config.FIELD, or a keyword of the function that TARGET names;
chip, execution, dtype, weights_dtype, kv_dtype; a number of the chip (chip.memory_bandwidth,
chip.matrix.bf16, chip.link.intra.bandwidth; chip.matrix is all of them) or a knob
(knobs.share.mm.memory, execution.weight_residency).  Values are numbers, quantities ("4.8 TB/s") or
factors (x0.5).  NAME+NAME=x0.5,x1 changes both together."""


@click.command(epilog=_HELP)
@click.argument("target")
@asks("sensitivity")
@click.option(
    "--points",
    type=Output(table=True),
    metavar="FILE.csv",
    help="With --grid: write every point there.",
)
@results("data", "rows", plot="Draw a tornado.", timeline=True)
def sensitivity(target: str, points: str | None, written: Written, asked: dict[str, Any]) -> None:
    """What moves a step of TARGET most: its sizes, facts of the chip, knobs; or factors of a grid.

    Without --grid: elasticities of FLOPs, bytes, memory and time, ranked, and finite steps that
    show cliffs.  With it: main effects and interactions of pairs, as shares of the variance.
    """
    from rooftrace._writing import write_bytes

    if points is not None and "grid" not in asked:
        raise RequestError(f"--points {points}: it is of a grid; name some factors with --grid")
    if written.timeline is not None and "grid" in asked:
        raise RequestError(
            f"--timeline {written.timeline}: a grid is many steps; leave --grid out for the "
            "timeline of one"
        )
    with progress():
        result: Any = rt.sensitivity(target, plot=written.plot, **asked)
    if points is not None:
        write_bytes(Path(points), result.frame().to_csv(index=False).encode())
    step = {name: value for name, value in asked.items() if name not in _OF_NUMBERS}
    if written.write(result, source=target, **step) and points is not None:
        say(f"\npoints written to {points}")


_OF_NUMBERS = ("over", "grid", "log", "response")
