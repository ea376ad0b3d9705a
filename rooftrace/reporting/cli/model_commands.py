"""Commands on models: report, trace, compare."""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

import rooftrace as rt
from rooftrace._progress import tell
from rooftrace.reporting.cli.options import (
    TARGET_HELP,
    Commas,
    chips_option,
    executions_option,
    output_options,
    pricing_options,
    rules_option,
    workload_options,
)
from rooftrace.reporting.cli.output import say
from rooftrace.reporting.cli.shared import (
    console,
    load_chips,
    load_executions,
    load_rules,
    progress,
    workload,
    write_text,
)


@click.command(epilog=TARGET_HELP)
@click.argument("target")
@workload_options
@pricing_options
@chips_option("Chips by name or TOML path; times are those of the first.")
@executions_option("naive,efficient")
@click.option(
    "--out",
    metavar="DIR",
    help="Folder for report.md, report.json, ops.csv and figures; - is stdout.",
)
@click.option(
    "--format",
    "formats",
    type=Commas(),
    help="Which files: md, json, csv, png (default: these four), trace (a timeline for Perfetto).",
)
@click.option(
    "--max-batch",
    is_flag=True,
    help="Find the largest batch that fits each chip, by tracing at other batches.",
)
def report(
    target: str,
    chips: tuple[str, ...],
    executions: tuple[str, ...],
    out: str | None,
    formats: tuple[str, ...] | None,
    max_batch: bool,
    tf32: bool,
    rules: tuple[str, ...],
    knobs: str | None,
    rewrites: tuple[str, ...],
    **request: Any,
) -> None:
    """Cost of each phase of TARGET: one screen, and a folder of files with --out."""
    from rooftrace.reporting.pages import check_folder, check_formats
    from rooftrace.tracer.sources import collector_paused

    how = {} if formats is None else {"formats": formats}
    if formats is not None:
        check_formats(formats)
    if out == "-" and (formats is None or len(formats) != 1 or formats[0] in ("png", "trace")):
        raise click.UsageError("--out - writes one format to stdout: add --format json, md or csv")
    loaded, models = load_chips(chips), load_executions(executions, tf32, knobs, rewrites)
    load_rules(rules)
    if out is not None and out != "-":
        check_folder(Path(out), **how)
    atexit.register(gc.unfreeze)  # objects that `keep` set aside are freed at the end too
    with progress(), collector_paused(keep=True):
        result = rt.report(
            target, chip=loaded, execution=models, max_batch=max_batch, **workload(**request)
        )
    written: Sequence[Path] = ()
    if out is not None and out != "-":
        with progress():
            tell("writing the report")
            written = result.write(Path(out), **how)
    if out == "-":
        _to_stdout(result, (formats or ("json",))[0])
        return
    console().print(result)
    if written:
        say(f"\nwritten to {Path(out or '.')}{os.sep}: {', '.join(path.name for path in written)}")


@click.command(epilog=TARGET_HELP)
@click.argument("target")
@workload_options
@rules_option
@click.option(
    "-o", "--out", required=True, metavar="FILE", help="graph.json or graph.json.gz; - is stdout."
)
def trace(target: str, out: str, rules: tuple[str, ...], **request: Any) -> None:
    """Capture TARGET and save its operator graphs, one per phase."""
    load_rules(rules)
    with progress():
        graphs = rt.priced_graphs(target, **workload(**request))
    if out == "-":
        from rooftrace.tracer.graphfiles import graphs_bytes

        sys.stdout.buffer.write(graphs_bytes(graphs))
        return
    rt.save(graphs, out)
    ops = {phase: sum(map(graph.times, graph.ops)) for phase, graph in graphs.items()}
    counts = ", ".join(f"{phase} {count} ops" for phase, count in ops.items())
    say(f"{out}: {counts}")


@click.command(epilog=TARGET_HELP)
@click.argument("target")
@workload_options
@click.option(
    "--with",
    "peers",
    type=Commas(),
    default="flopcounter,fvcore",
    show_default=True,
    help="Other counters: flopcounter (PyTorch's own FlopCounterMode), fvcore.",
)
@click.option(
    "--rules", multiple=True, metavar="FILE.py", help="Python file with @rooftrace.rule functions."
)
@output_options
def compare(
    target: str,
    peers: tuple[str, ...],
    rules: tuple[str, ...],
    form: str,
    out: str | None,
    **request: Any,
) -> None:
    """FLOPs of TARGET by other counters too, each difference itemised.

    They run the same module on the same inputs; what they do not count stands with its module, its
    op and the reason.
    """
    from rooftrace.reporting.text import (
        as_markdown,
        comparisons_view,
        renderable,
    )
    from rooftrace.tracer.graphfiles import looks_saved

    if looks_saved(target):
        raise click.UsageError(
            f"{target}: other counters have to run the module; pass the target it was traced from"
        )
    load_rules(rules)
    with progress():
        comparisons = rt.compare(target, peers=peers, **workload(**request))
    write_text(
        form,
        out,
        lambda: renderable(comparisons_view(target, comparisons)),
        lambda: as_markdown(comparisons_view(target, comparisons)),
        lambda: {"target": target, "comparisons": [item.to_dict() for item in comparisons]},
    )


def _to_stdout(result: Any, form: str) -> None:
    if form == "json":
        click.echo(json.dumps(result.to_dict(), indent=1, allow_nan=False))
    elif form == "csv":
        click.echo(result.to_csv(), nl=False)
    else:
        from rooftrace.reporting.text import as_markdown

        click.echo(as_markdown(result), nl=False)
