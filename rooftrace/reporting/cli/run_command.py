"""The command run: an unmodified script on a GPU that is not there."""

from __future__ import annotations

from typing import Any

import click

import rooftrace as rt
from rooftrace.errors import RequestError, hint
from rooftrace.reporting.cli.options import EXECUTIONS, TimelineFile, table_options
from rooftrace.reporting.cli.output import say
from rooftrace.reporting.cli.outputs import Output
from rooftrace.reporting.cli.shared import (
    form_of,
    load_executions,
    load_rules,
    once,
    write_result,
    write_timeline,
)

_HELP = """The script runs as written, on the CPU and its memory, without a GPU.  It sees a CUDA
device with the name and memory of the chip.  Tensors there have shapes and no values: a loss that
is read is a stated assumption.  What it does on the host is real: data, logging, files.

\b
    rooftrace run --chip h100-sxm train.py --batch_size=12
    rooftrace run --system dgx-a100 -- torchrun --nproc_per_node=8 train.py config.py
"""


@click.command(
    name="run",
    epilog=_HELP,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("command", metavar="SCRIPT [ARGUMENT]...", nargs=-1, type=click.UNPROCESSED)
@click.option("--chip", help="Chip by name or TOML path.  [default: h200-sxm]")
@click.option("--system", help="How chips are joined, by name or TOML path, in place of --chip.")
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="End the script after so many training steps; after so many calls, if it trains nothing.",
)
@click.option("--to-end", is_flag=True, help="Run the script to its own end.")
@click.option("--ranks", type=click.IntRange(min=1), help="Processes, where no launcher says.")
@click.option(
    "--rank", type=click.IntRange(min=0), default=0, show_default=True, help="Which of them runs."
)
@click.option(
    "--boundary",
    default="auto",
    show_default=True,
    metavar="auto|batch|call|optimizer|mark=NAME",
    help="What begins a turn: training steps and calls are found; a batch of a data loader; a call "
    "of a module; the end of the optimizers' step; a range of torch.profiler or NVTX of that name "
    "(step: a profiler's step()).",
)
@click.option("--execution", help=f"{EXECUTIONS}.  [default: mixed]")
@click.option("--tf32", is_flag=True, help="fp32 matrix products in TF32.")
@click.option("--knobs", metavar="FILE", help="Fitted constants (rooftrace calibrate).")
@click.option(
    "--clock",
    type=click.Choice(["real", "simulated"]),
    default="real",
    show_default=True,
    help="The time that the script reads: of this machine, or what its steps take on the chip.",
)
@click.option(
    "--scratch", metavar="DIR", help="Folder in which files come to lie that the script writes."
)
@click.option(
    "--assume",
    "assumed",
    multiple=True,
    metavar="KIND[@MODULE|@FILE:LINE]=VALUE",
    help="What is taken for unknown values, as value=2.5.  Repeatable.",
)
@click.option("--rules", multiple=True, metavar="FILE.py", help="Cost rules of yours.  Repeatable.")
@click.option(
    "--save",
    type=Output(),
    metavar="FILE.json.gz",
    help="Write the graphs of the steady step, for any command.",
)
@click.option(
    "--timeline",
    type=TimelineFile(),
    metavar="FILE.json.gz",
    help="Write the whole run there: data loaders beside the device; for ui.perfetto.dev.",
)
@table_options
def run_script(
    command: tuple[str, ...], steps: int, to_end: bool, form: str | None, out: str | None,
    execution: str | None, tf32: bool, knobs: str | None, rules: tuple[str, ...],
    assumed: tuple[str, ...], save: str | None, timeline: str | None, **asked: Any,
) -> None:  # fmt: skip
    """Run SCRIPT, unmodified, on a GPU that is not there: what its steps cost, and why.

    Options of rooftrace stand before SCRIPT; all that follows it is the script's.  A script that
    exits with another code than 0 gives it to the command.
    """
    from rooftrace.tracer.asking import assumptions

    if not command:
        raise click.UsageError("expected a script: rooftrace run train.py, or -- torchrun train.py")
    if command[0].startswith("--"):
        raise click.UsageError(
            f"no such option: {command[0]}{hint(command[0], _own_options())}; options of rooftrace "
            "stand before the script, and those of the script after it"
        )
    if execution is None and (tf32 or knobs):
        raise RequestError("--tf32 and --knobs are of an execution: add --execution")
    load_rules(rules)
    model = load_executions([execution], tf32, knobs)[0] if execution else None
    with once():
        result = rt.run(
            list(command),
            steps=None if to_end else steps,
            execution=model,
            assume=dict(map(assumptions.parse_assumption, assumed)),
            **asked,
        )
    if save is not None:
        graphs = result.script.by_phase()
        if not graphs:
            raise RequestError("--save: nothing ran on the device, so there is no step to write")
        rt.save(graphs, save)
    shown = write_result(result, form_of(form, out), out, document=lambda: _document(result))
    write_timeline(timeline, result, quiet=not shown)
    if shown and save is not None:
        say(f"\nthe steady step is in {save}: rooftrace report {save}")
    if result.script.code:
        raise SystemExit(result.script.code)


def _document(result: rt.ScriptCost) -> dict[str, Any]:
    """The run; of each row also the fields that a report has of a step.  `peak` is in bytes."""
    from rooftrace.reporting.sections import document

    turns = [{**document(result.whole(row)), **row.to_dict()} for row in result.rows]
    return {**result.to_dict(), "turns": turns}


def _own_options() -> list[str]:
    return [name for option in run_script.params for name in option.opts if name[:2] == "--"]
