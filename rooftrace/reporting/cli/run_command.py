"""The command run: an unmodified script on a GPU that is not there."""

from __future__ import annotations

from typing import Any

import click

import rooftrace as rt
from rooftrace.errors import RequestError, hint
from rooftrace.reporting.cli.output import OutputPath, say
from rooftrace.reporting.cli.shared import CommandOutput, command, once, results

_HELP = """The script runs as written, on the CPU and its memory, without a GPU.  It sees a CUDA
device with the name and memory of the chip.  Tensors there have shapes and no values: a loss that
is read is a stated assumption.  What it does on the host is real: data, logging, files.

\b
    rooftrace run --chip h100-sxm train.py --batch_size=12
    rooftrace run --system dgx-a100 -- torchrun --nproc_per_node=8 train.py config.py
"""


@command(
    "run",
    name="run",
    epilog=_HELP,
    defaults={"execution": "mixed"},
    results=results(
        "data",
        "rows",
        timeline="Write all of the run there, data loaders and the device; for ui.perfetto.dev.",
    ),
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("command", metavar="SCRIPT [ARGUMENT]...", nargs=-1, type=click.UNPROCESSED)
@click.option("--to-end", is_flag=True, help="Run the script to its end, not only --steps steps.")
@click.option(
    "--save",
    type=OutputPath(),
    metavar="FILE.json.gz",
    help="Write the graphs of the steady step, for any command.",
)
def run_script(
    command: tuple[str, ...],
    to_end: bool,
    save: str | None,
    output: CommandOutput,
    arguments: dict[str, Any],
) -> None:
    """Run SCRIPT, unmodified, on a GPU that is not there.

    Options of rooftrace stand before SCRIPT; all that follows it is the script's.  A script that
    exits with another code than 0 gives it to the command.
    """
    if not command:
        raise click.UsageError("expected a script: rooftrace run train.py, or -- torchrun train.py")
    if command[0].startswith("--"):
        raise click.UsageError(
            f"no such option: {command[0]}{hint(command[0], _own_options())}; options of rooftrace "
            "stand before the script, and those of the script after it"
        )
    with once():
        result = rt.run(list(command), **{**arguments, **({"steps": None} if to_end else {})})
    if save is not None:
        graphs = result.script.by_phase()
        if not graphs:
            raise RequestError("--save: nothing ran on the device, so there is no step to write")
        rt.save(graphs, save)
    shown = output.write(result, document=lambda: _document(result))
    if shown and save is not None:
        say(f"\nthe steady step is in {save}: rooftrace report {save}")
    if result.script.code:
        raise SystemExit(result.script.code)


def _document(result: rt.types.ScriptCost) -> dict[str, Any]:
    """The run; of each row also the fields that a report has of a step.  `peak` is in bytes."""
    from rooftrace.reporting.sections import document

    turns = [{**document(result.whole(row)), **row.to_dict()} for row in result.rows]
    return {**result.to_dict(), "turns": turns}


def _own_options() -> list[str]:
    return [name for option in run_script.params for name in option.opts if name[:2] == "--"]
