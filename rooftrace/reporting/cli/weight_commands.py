"""Commands on weights: inventory, and a diff of checkpoints."""

from __future__ import annotations

from typing import Any

import click

import rooftrace as rt
from rooftrace.errors import RequestError
from rooftrace.reporting.cli.asking import asks
from rooftrace.reporting.cli.options import TARGET_HELP
from rooftrace.reporting.cli.shared import progress
from rooftrace.reporting.cli.written import Written, results

_HELP = f"""{TARGET_HELP}  It may also be a checkpoint: a file of safetensors or torch.save,
the index.json of a sharded one, or a folder with one."""


@click.command(epilog=_HELP)
@click.argument("target")
@asks("inventory")
@click.option(
    "--against", metavar="OTHER", help="Parameters of TARGET and of OTHER, module by module."
)
@results("data", plot="Draw a histogram of each tensor; reads the values.")
def inventory(target: str, against: str | None, written: Written, asked: dict[str, Any]) -> None:
    """What TARGET consists of: parameters, memory, a row for each tensor, statistics of weights."""
    if against is not None and ("weights" in asked or written.plot):
        raise RequestError(
            "--against compares numbers of parameters: leave --weights and --plot out, or compare "
            "the values of two checkpoints with `rooftrace diff`"
        )
    result: Any
    with progress():
        result = rt.inventory(target, plot=written.plot, **asked)
        if against is not None:
            result = rt.diff(result, rt.inventory(against, weights=False, **asked))
    written.write(result, drawn="weights drawn")


_OF_CHECKPOINTS = ("words", "names", "form", "out", "fail_on", "force", "traceback")


def check_checkpoints(fail_on: tuple[str, ...]) -> None:
    """Raise the error of an option of `rooftrace diff` that does not fit two checkpoints."""
    from rooftrace.tracer.checkpoints import CheckpointDiff

    context = click.get_current_context()
    unused = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name not in _OF_CHECKPOINTS
        and context.get_parameter_source(str(parameter.name))
        is click.core.ParameterSource.COMMANDLINE
    ]
    if unused:
        raise RequestError(
            f"{', '.join(unused)}: a checkpoint has weights, and no step that is run; name its "
            "config.json to compare costs"
        )
    CheckpointDiff.limits(fail_on)
