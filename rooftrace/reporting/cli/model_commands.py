"""Commands on models and scripts: report, trace, compare, run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

import rooftrace as rt
from rooftrace._formats import FIGURES, TEXTS, USUAL
from rooftrace._outputs import check_output
from rooftrace._progress import tell
from rooftrace.errors import RequestError, hint
from rooftrace.reporting.cli.options import (
    Choice,
    OutputPath,
    complain,
    names_option,
    say,
    style_option,
    timeline_option,
)
from rooftrace.reporting.cli.shared import (
    CommandOutput,
    command,
    console,
    once,
    progress,
    rendered,
    results,
)
from rooftrace.reporting.commands.options import words


@command(
    "report",
    helps={"chip": "Chips by name or TOML path; times are those of the first."},
    results=[
        click.Option(
            ["-o", "--out"],
            type=OutputPath(folder=True, table=True),
            metavar="DIR|FILE",
            help="Folder for report.html, report.md, report.json, ops.csv and figures; a file that "
            "ends in .html, .md, .tex, .json or .csv is that one alone; - is stdout.",
        ),
        style_option(),
        timeline_option(),
    ],
)
@click.argument("targets", metavar="TARGET...", nargs=-1, required=True)
@names_option()
@click.option(
    "--format",
    "formats",
    type=words,
    metavar="LIST",
    help="Which files: html (a page to explore), md, json, csv, png (default: these five), svg and "
    "pdf (figures to print), tex (LaTeX: the report, and a file for each table), trace (a "
    "timeline for Perfetto), chakra (execution traces for simulators of networks, of this process; "
    "chakra-all of all).  Without --out: one of json, md, csv, html, tex, to stdout.  "
    "With --table: one of terminal, md, html, tex, json, csv.",
)
@click.option(
    "--max-batch",
    is_flag=True,
    help="Find the largest batch that fits each chip, by tracing at other batches.",
)
@click.option(
    "--table",
    type=Choice(["nodes", "census"]),
    help="In place of the report, one table of one phase.  nodes: each kernel with the bytes of "
    "weights, inputs and outputs that it moves.  census: matrix products by M, N, K.",
)
@click.option(
    "--align",
    type=click.IntRange(min=1),
    metavar="BYTES",
    help="With --table census: a size is odd if its rows in memory are no multiple of so many "
    "bytes; default: 16.",
)
def report(
    targets: tuple[str, ...],
    names: tuple[str, ...] | None,
    formats: tuple[str, ...] | None,
    max_batch: bool,
    table: str | None,
    align: int | None,
    output: CommandOutput,
    arguments: dict[str, Any],
) -> None:
    """Price each phase of TARGET: one screen, or a folder of files.

    --out writes the folder.  Several TARGETs have a folder each inside of it, and one table and
    roofline with all.
    """
    from rooftrace.reporting.commands.reportfolder import check_folder, check_formats

    if names is not None and len(targets) == 1:
        raise RequestError(f"--names {','.join(names)}: it is for several TARGETs together")
    if align is not None and table != "census":
        raise RequestError(f"--align {align}: it is for --table census")
    if table is not None:
        if max_batch or len(targets) > 1:
            other = "--max-batch" if max_batch else f"{len(targets)} TARGETs"
            raise RequestError(f"--table {table} is of one step: {other} is for a report")
        _write_table(targets[0], table, align or 16, formats, output, arguments)
        return
    used = USUAL if formats is None else formats
    check_formats(used)
    said = f"--out {output.out}"
    if formats is not None and output.out is None:  # to stdout, as of other commands
        output, said = replace(output, out="-"), f"--format {','.join(formats)}"
    out = output.out
    single = _format_of_file(formats, output)
    many = len(targets) > 1
    if many and (out == "-" or single):
        raise RequestError(
            f"{said}: it is for one TARGET, and {len(targets)} are named; name a folder: --out DIR"
        )
    if out not in (None, "-") and not single and not many:
        check_folder(Path(str(out)), used)
    arguments = {"max_batch": max_batch, **arguments}
    if many:
        report_many(targets, formats, output, {"names": names, **arguments})
        return
    with once():
        result = rt.report(targets[0], **arguments)
    if out == "-":
        replace(output, form=(formats or ("json",))[0]).write(result)
        return
    _write(result, single, used, output)
    output.write_timeline(result)


def _write_table(
    target: str,
    table: str,
    align: int,
    formats: Sequence[str] | None,
    output: CommandOutput,
    arguments: dict[str, Any],
) -> None:
    """Write the nodes or the census of one step.  Raises RequestError for options that clash."""
    if formats is not None and (len(formats) != 1 or formats[0] not in ("terminal", *TEXTS)):
        raise RequestError(
            f"--format {','.join(formats)}: --table {table} takes one of terminal, "
            f"{', '.join(TEXTS)}"
        )
    output = replace(output, form=None if formats is None else formats[0])
    if output.style != "screen" and output.format != "tex":
        raise RequestError(f"--style {output.style}: with --table it is of LaTeX: add --format tex")
    if output.out not in (None, "-"):
        check_output(Path(str(output.out)))
    with once():
        estimate = rt.estimate(target, **arguments)
    rows = estimate.by_node() if table == "nodes" else estimate.census(align)
    output.write(rows, of=estimate)


def _write(result: Any, single: str, formats: Sequence[str], output: CommandOutput) -> None:
    """A report to the screen, and to the folder or the one file of --out."""
    paths: Sequence[Path] = ()
    out = output.out
    if out is not None and single:
        replace(output, form=single, timeline=None).write(result)
    elif out is not None:
        with progress():
            tell("writing the report")
            paths = result.write(Path(out), formats, style=output.style)
    console().print(rendered(result, "rich"))
    if paths:
        say(f"\nwritten to {Path(out or '.')}{os.sep}: {', '.join(_names(paths))}")
    elif out is not None:
        say(f"\nwritten to {out}")


def _names(paths: Sequence[Path]) -> list[str]:
    """Names of files; those of single tables, which are dozens, as one."""
    names = [path.name for path in paths]
    tables = [name for name in names if name.startswith("table-") and name.endswith(".tex")]
    rest = [name for name in names if name not in tables]
    return [*rest, f"{len(tables)} of table-*.tex"] if tables else rest


def _format_of_file(formats: Sequence[str] | None, output: CommandOutput) -> str:
    """The format of a report that is one file; "" for one that is a folder, or that is not kept.

    Raises UsageError or RequestError where --out, --format and --style do not go together.
    """
    out, style = output.out, output.style
    if out == "-" and (formats is None or len(formats) != 1 or formats[0] not in TEXTS):
        option = f"--format {','.join(formats)}" if formats else "--out -"
        raise click.UsageError(
            f"{option}: stdout takes one format: json, md, csv, html or tex; files need --out DIR"
        )
    ending = Path(out).suffix[1:] if out is not None and not Path(out).is_dir() else ""
    single = ending in TEXTS
    drawn = not single and out not in (None, "-") and not {*FIGURES}.isdisjoint(formats or FIGURES)
    tabled = ending == "tex" or "tex" in (formats or ())
    if style != "screen" and not drawn and not tabled:
        raise RequestError(
            f"--style {style}: it is for figures and LaTeX: add --out DIR with png, svg, pdf or tex"
        )
    if not single:
        return ""
    if formats is not None and tuple(formats) != (ending,):
        raise click.UsageError(
            f"--out {out} is one file, and --format {','.join(formats)} is not: leave --format "
            "out, or name a folder"
        )
    return ending


@command("priced_graphs")
@click.argument("target")
@click.option(
    "-o",
    "--out",
    type=OutputPath(),
    required=True,
    metavar="FILE",
    help="graph.json or graph.json.gz; - is stdout.",
)
def trace(target: str, out: str, arguments: dict[str, Any]) -> None:
    """Save the operator graphs of TARGET, one for each phase.

    Every command takes the file in place of TARGET, and does not run the model again."""
    with once():
        graphs = rt.tools.priced_graphs(target, **arguments)
        if out != "-":
            tell(f"writing {out}")
            rt.save(graphs, out)
    if out == "-":
        from rooftrace.graph import graphs_bytes

        sys.stdout.buffer.write(graphs_bytes(graphs))
        return
    ops = {phase: sum(map(graph.times, graph.ops)) for phase, graph in graphs.items()}
    counts = ", ".join(f"{phase} {count} ops" for phase, count in ops.items())
    say(f"{out}: {counts}")


@command("compare", results=results("data"))
@click.argument("target")
@click.option(
    "--with",
    "peers",
    type=words,
    metavar="LIST",
    default="flopcounter,fvcore",
    show_default=True,
    help="Other counters: flopcounter (PyTorch's FlopCounterMode), fvcore.",
)
def compare(
    target: str, peers: tuple[str, ...], output: CommandOutput, arguments: dict[str, Any]
) -> None:
    """Count FLOPs of TARGET by other counters, and explain gaps.

    They run the same module on the same inputs; each op that one does not count stands with its
    module and the reason.
    """
    from rooftrace.graph import looks_saved
    from rooftrace.reporting.views import comparisons_view

    if looks_saved(target):
        raise click.UsageError(
            f"{target}: other counters have to run the module; pass the target it was traced from"
        )
    with once():
        comparisons = rt.compare(target, peers=peers, **arguments)
    output.write(
        comparisons_view(target, comparisons),
        document=lambda: {"target": target, "comparisons": [c.to_dict() for c in comparisons]},
    )


# -- many reports ----------------------------------------------------------------------------------
# `rooftrace report A B C`: a folder for each target, and a comparison of all.


def report_many(
    targets: Sequence[str],
    formats: Sequence[str] | None,
    output: CommandOutput,
    arguments: dict[str, Any],
) -> None:
    """Reports on several targets; exits with 1 where one of them failed."""
    out = output.out
    with progress():
        result = rt.tools.reports(
            targets, out=out, formats=formats, style=output.style, **arguments
        )
    if result.reports:
        console().print(rendered(result, "rich"))
    if out is not None and result.reports:
        there = [path for path in sorted(Path(out).iterdir()) if path.name[0] not in "._"]
        said = ", ".join(path.name + os.sep * path.is_dir() for path in there)
        say(f"\nin {Path(out)}{os.sep}: {said}")
    if result.reports:
        output.write_timeline(result)
    for target, why in result.failures.items():
        complain(f"{target} failed: {why}")
    if result.failures:
        sys.exit(1)


# -- run -------------------------------------------------------------------------------------------
# `rooftrace run SCRIPT`: an unmodified script on a GPU that is not there.

_RUN = """The script runs as written, on the CPU and its memory, without a GPU.  It sees a CUDA
device with the name and memory of the chip.  Tensors there have shapes and no values: a loss that
is read is a stated assumption.  What it does on the host is real: data, logging, files.

\b
    rooftrace run --chip h100-sxm train.py --batch_size=12
    rooftrace run --system dgx-a100 -- torchrun --nproc_per_node=8 train.py config.py
"""


@command(
    "run",
    name="run",
    epilog=_RUN,
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
        options = [name for o in run_script.params for name in o.opts if name[:2] == "--"]
        raise click.UsageError(
            f"no such option: {command[0]}{hint(command[0], options)}; options of rooftrace "
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
