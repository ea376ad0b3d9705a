"""The command line.  Exit codes: 0 good, 1 a check failed, 2 a wrong request (one line says how).

Only click is imported up front, so that `--help` answers at once.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rooftrace.costmodels.execution import ExecutionModel
    from rooftrace.costmodels.largest import LargestBatch
    from rooftrace.hardware.chip import Chip
    from rooftrace.tracer.graph import OpGraph
    from rooftrace.tracer.request import Options, Request

_TARGET_HELP = """TARGET is package.module:attr or path/file.py:attr (a module, or a function
returning a module or (module, inputs)), the path of a Hugging Face config.json, hf:ORG/NAME, or a
saved graph."""


class _Commas(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks only
    """A comma-separated list."""

    name = "LIST"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(part.strip() for part in str(value).split(",") if part.strip())


def _workload_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--batch, --seq, --phase, --dtype ...: what is run."""
    options = (
        click.option(
            "--phase",
            "phases",
            type=_Commas(),
            help="forward, training, prefill, decode; default: those that fit the model.",
        ),
        click.option(
            "--batch", type=int, help="Batch size; default 1, or that of the given inputs."
        ),
        click.option("--seq", type=int, help="Sequence (prompt) length in tokens."),
        click.option("--kv", type=int, help="Cached length before a decode step; default: --seq."),
        click.option(
            "--input",
            "inputs",
            multiple=True,
            metavar="NAME=SHAPE:DTYPE",
            help="An input by name, for example pixels=8,3,224,224:fp32.  Repeatable.",
        ),
        click.option(
            "--dtype", help="Price the model's own floats in this precision (fp8, bf16, int4 ...)."
        ),
        click.option("--weights-dtype", help="Price weights in this precision."),
        click.option("--kv-dtype", help="Price the KV cache in this precision."),
        click.option(
            "--optimizer",
            default="adamw",
            show_default=True,
            help="Optimizer of a training step: none, or any of torch.optim.",
        ),
        click.option(
            "--assume",
            "assumed",
            multiple=True,
            metavar="KIND[@MODULE]=VALUE",
            help="Decide what a trace cannot know, for example branch=true or "
            "balanced-routing@*.gate=uniform.  Repeatable.",
        ),
        click.option(
            "--repeats/--no-repeats",
            default=True,
            show_default=True,
            help="Run layers that are alike once, and list them once.",
        ),
        click.option(
            "--trust-remote-code",
            is_flag=True,
            help="Let a Hugging Face repository run its own code.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _pricing_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--tf32, --rules, --knobs: how it is priced."""
    options = (
        click.option(
            "--knobs",
            metavar="FILE",
            help="What a calibration found (a TOML file), in place of datasheet peaks.",
        ),
        click.option("--tf32", is_flag=True, help="Run fp32 matrix products on the matrix engine."),
        click.option(
            "--rules",
            multiple=True,
            metavar="FILE.py",
            help="Python file with @rooftrace.rule functions.  Repeatable.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--format, --out: one text, to the terminal or a file."""
    form = click.option(
        "--format",
        "form",
        type=click.Choice(["terminal", "md", "json"]),
        default="terminal",
        show_default=True,
    )
    out = click.option(
        "--out", metavar="FILE", help="Write there instead of the terminal; - is stdout."
    )
    return form(out(command))


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="rooftrace", message="rooftrace %(version)s")
def cli() -> None:
    """What a training, prefill or decode step of any nn.Module costs on a chip, and what limits it.

    No GPU, no weights and no per-model adapter needed.  Start with:

        rooftrace report examples/configs/gpt2.json --batch 8 --seq 255 --chip h200-sxm
    """


@cli.command(epilog=_TARGET_HELP)
@click.argument("target")
@_workload_options
@_pricing_options
@click.option(
    "--chip",
    "chips",
    type=_Commas(),
    default="h200-sxm",
    show_default=True,
    help="Chips by name or TOML path; times are those of the first.",
)
@click.option(
    "--execution",
    "executions",
    type=_Commas(),
    default="naive,efficient",
    show_default=True,
    help="naive, eager, compiled, efficient, seed-naive, seed-efficient.",
)
@click.option(
    "--out",
    metavar="DIR",
    help="Folder for report.md, report.json, ops.csv and figures; - is stdout.",
)
@click.option(
    "--format",
    "formats",
    type=_Commas(),
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
    **request: Any,
) -> None:
    """Cost of each phase of TARGET: one screen, and a folder of files with --out."""
    from rooftrace.reporting.files import check_folder
    from rooftrace.reporting.report import ALL_FORMATS, FORMATS, build_report
    from rooftrace.tracer.api import collector_paused

    for name in formats or ():
        if name not in ALL_FORMATS:
            raise click.UsageError(f"--format {name!r}: expected some of {', '.join(ALL_FORMATS)}")
    if out == "-" and (formats is None or len(formats) != 1 or formats[0] in ("png", "trace")):
        raise click.UsageError("--out - writes one format to stdout: add --format json, md or csv")
    loaded, models = _chips(chips), _executions(executions, tf32, knobs)
    _load_rules(rules)
    if out is not None and out != "-":
        check_folder(Path(out))
    atexit.register(gc.unfreeze)  # what `keep` sets aside is still taken down at the end
    with _progress() as tell, collector_paused(keep=True):
        graphs = _graphs(target, tell, **request)
        result = build_report(graphs, loaded, models, progress=tell)
        if max_batch:
            phases = tuple(graphs)
            found = _largest_batch(target, loaded, tell, **{**request, "phases": phases})
            result = replace(result, largest=found)
    written: Sequence[Path] = ()
    if out is not None and out != "-":
        with _progress() as tell:
            tell("writing the report")
            written = result.write(Path(out), formats or FORMATS)
    if out == "-":
        _to_stdout(result, (formats or ("json",))[0])
        return
    _console().print(result)
    if written:
        click.echo(
            f"\nwritten to {Path(out or '.')}{os.sep}: {', '.join(path.name for path in written)}"
        )


@cli.command(epilog=_TARGET_HELP)
@click.argument("target")
@_workload_options
@click.option(
    "-o", "--out", required=True, metavar="FILE", help="graph.json or graph.json.gz; - is stdout."
)
def trace(target: str, out: str, **request: Any) -> None:
    """Capture TARGET and save its operator graphs, one per phase."""
    from rooftrace.tracer.graphfile import graphs_bytes, write_bytes

    with _progress() as tell:
        graphs = _graphs(target, tell, **request)
    if out == "-":
        sys.stdout.buffer.write(graphs_bytes(graphs, compress=False))
        return
    write_bytes(Path(out), graphs_bytes(graphs, compress=out.endswith(".gz")))
    ops = {phase: sum(map(graph.times, graph.ops)) for phase, graph in graphs.items()}
    counts = ", ".join(f"{phase} {count} ops" for phase, count in ops.items())
    click.echo(f"{out}: {counts}")


@cli.command(epilog=_TARGET_HELP)
@click.argument("before")
@click.argument("after")
@_workload_options
@_pricing_options
@click.option(
    "--names",
    nargs=2,
    default=None,
    metavar="BEFORE AFTER",
    help="What to call the two in the output.",
)
@click.option("--chip", default="h200-sxm", show_default=True, help="A chip by name or TOML path.")
@click.option(
    "--execution",
    default="efficient",
    show_default=True,
    help="The execution model to compare under.",
)
@_output_options
@click.option(
    "--fail-on",
    multiple=True,
    metavar="METRIC>LIMIT",
    help='Exit 1 when a metric grows beyond it: "time>5%", "memory>1 GiB".  Metrics: time, '
    "flops, bytes, memory, params, kernels.  Repeatable.",
)
def diff(
    before: str,
    after: str,
    names: tuple[str, str] | None,
    chip: str,
    execution: str,
    form: str,
    out: str | None,
    fail_on: tuple[str, ...],
    tf32: bool,
    rules: tuple[str, ...],
    knobs: str | None,
    **request: Any,
) -> None:
    """What changed in cost from BEFORE to AFTER: targets or saved graphs."""
    from rooftrace.costmodels.diff import diff_estimates, parse_condition
    from rooftrace.costmodels.estimate import estimate
    from rooftrace.reporting.difftext import diff_markdown, render_diff
    from rooftrace.tracer.graphfile import looks_saved

    for condition in fail_on:
        parse_condition(condition)
    (loaded,), (model,) = _chips((chip,)), _executions((execution,), tf32, knobs)
    _load_rules(rules)
    if looks_saved(before) != looks_saved(after):
        request["only_unsaved"] = True  # sizes are for the side that is still to be traced
    with _progress() as tell:
        sides = [
            {
                phase: estimate(graph, loaded, model)
                for phase, graph in _graphs(t, tell, **request).items()
            }
            for t in (before, after)
        ]
    result = diff_estimates(sides[0], sides[1], names or (before, after))
    _write_text(
        form, out, lambda: render_diff(result), lambda: diff_markdown(result), result.to_dict
    )
    broken = result.violations(fail_on)
    for sentence in broken:
        click.echo(f"rooftrace: {sentence}", err=True)
    if broken:
        sys.exit(1)


@cli.command(epilog=_TARGET_HELP)
@click.argument("target")
@_workload_options
@click.option(
    "--with",
    "peers",
    type=_Commas(),
    default="flopcounter,fvcore",
    show_default=True,
    help="Other counters: flopcounter (PyTorch's own FlopCounterMode), fvcore.",
)
@click.option(
    "--rules", multiple=True, metavar="FILE.py", help="Python file with @rooftrace.rule functions."
)
@_output_options
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
    from rooftrace.reporting.api import compare_target
    from rooftrace.reporting.comparetext import comparisons_markdown, render_comparisons
    from rooftrace.tracer.graphfile import looks_saved

    if looks_saved(target):
        raise click.UsageError(
            f"{target}: other counters have to run the module; pass the target it was traced from"
        )
    _load_rules(rules)
    phases, sizes, options = _request(**request)
    with _progress() as tell:
        found = compare_target(target, peers, phases, sizes, options, tell)
    _write_text(
        form,
        out,
        lambda: render_comparisons(target, found),
        lambda: comparisons_markdown(target, found),
        lambda: {"target": target, "comparisons": [one.to_dict() for one in found]},
    )


@cli.group()
def chips() -> None:
    """The chips that come with rooftrace: list, show, lint."""


@chips.command("list")
def chips_list() -> None:
    """Every chip with its dense peaks, memory and ridge point."""
    from rooftrace.reporting.chiptext import render_chip_list

    _console().print(render_chip_list())


@chips.command("show")
@click.argument("name")
def chips_show(name: str) -> None:
    """Every fact of one chip (a name or a TOML path) with its source and kind."""
    from rooftrace.hardware.chipfile import load_chip
    from rooftrace.reporting.chiptext import render_chip

    _console().print(render_chip(load_chip(name)))


@chips.command("lint")
@click.argument("paths", nargs=-1)
def chips_lint(paths: tuple[str, ...]) -> None:
    """Check chip files (default: those that come with rooftrace); exit 1 on errors or warnings."""
    from rooftrace.hardware.chipfile import available_chips, lint_chip

    bad = 0
    for path in paths or available_chips():
        findings = lint_chip(path)
        serious = [f for f in findings if f.severity != "note"]
        bad += len(serious)
        click.echo(f"{path}: {'ok' if not serious else f'{len(serious)} problems'}")
        for finding in findings if paths else serious:
            click.echo(f"  {finding.severity}: {finding.field}: {finding.message}")
    if bad:
        sys.exit(1)


@cli.command()
@click.argument("targets", nargs=-1, metavar="[TARGET]...")
@click.option(
    "--chip-only", is_flag=True, help="Measure this machine's rates and write them as a chip."
)
@click.option("--device", default=None, help="cpu or cuda; default: cuda where there is one.")
@click.option(
    "--budget", type=float, help="Seconds to spend; default 480, --quick 90, --chip-only 20."
)
@click.option("--quick", is_flag=True, help="A trial of the whole suite, in about a minute.")
@click.option("--phase", "phases", type=_Commas(), help="Of a TARGET; default: all it has.")
@click.option("--batch", type=int, help="Batch size of a TARGET.")
@click.option("--seq", type=int, help="Sequence (prompt) length of a TARGET.")
@click.option(
    "-o",
    "--out",
    metavar="FILE",
    help="The run (default measurements/DEVICE-DATE.json.gz; one that is there is gone on with), "
    "or with --chip-only the TOML of the chip (default: stdout).",
)
def measure(
    targets: tuple[str, ...],
    chip_only: bool,
    device: str | None,
    budget: float | None,
    quick: bool,
    phases: tuple[str, ...] | None,
    batch: int | None,
    seq: int | None,
    out: str | None,
) -> None:
    """Measure this device: operations alone, then whole models, into one file.

    TARGET: only these, models of the suite (wildcards too) or any that the other commands take.
    """
    if chip_only:
        _measure_chip(targets, device, 20.0 if budget is None else budget, out)
        return
    from rooftrace.tracer.measure import default_out, measure_suite
    from rooftrace.tracer.measure import summary as measured
    from rooftrace.tracer.measure_chip import default_device
    from rooftrace.tracer.session import BUDGET_S, QUICK_S, Plan, start_again

    device = device or default_device()
    path = Path(out) if out else default_out(device)
    usual = QUICK_S if quick else BUDGET_S
    seconds = usual if budget is None else budget
    plan = Plan(path, device, seconds, quick, targets, phases, batch, seq)
    with _progress() as tell:
        run = measure_suite(plan, tell, start_again)
    click.echo(measured(run, path))


def _measure_chip(
    targets: tuple[str, ...], device: str | None, budget: float, out: str | None
) -> None:
    if targets:
        raise click.UsageError(f"--chip-only measures no model: leave out {' '.join(targets)}")
    from rooftrace.hardware.chipfile import dump_chip, write_chip
    from rooftrace.reporting.chiptext import render_chip
    from rooftrace.tracer.measure_chip import default_device, measure_chip

    with _progress() as tell:
        chip = measure_chip(device or default_device(), budget, progress=tell)
    if out in (None, "-"):
        click.echo(dump_chip(chip), nl=False)
        return
    write_chip(chip, str(out))
    _console().print(render_chip(chip))
    click.echo(f"\nwritten to {out}; use it as --chip {out}")


@cli.command()
@click.argument("steps", metavar="STEPS.csv|RUN.json.gz")
@click.option("--chip", required=True, help="The chip that they were measured on.")
@click.option(
    "--execution",
    default="eager",
    show_default=True,
    help="How the steps were run: eager, compiled, efficient (one CUDA graph).",
)
@click.option(
    "--target",
    default="{target}",
    show_default=True,
    metavar="TEMPLATE",
    help="How a name in the table becomes a target, for example models.py:{target}.",
)
@click.option("--start", metavar="FILE", help="Knobs to begin with; default: typical ones.")
@click.option(
    "--free",
    type=_Commas(),
    default="compute,memory",
    show_default=True,
    help="Knobs to fit: compute, memory, overlap, launch, dispatch, layout, or the share of a "
    'class, such as "mm.compute".',
)
@click.option("--title", default="", help="What to call the result.")
@click.option(
    "-o", "--out", required=True, metavar="FILE.toml", help="Where to write the knobs; - is stdout."
)
def calibrate(
    steps: str,
    chip: str,
    execution: str,
    target: str,
    start: str | None,
    free: tuple[str, ...],
    title: str,
    out: str,
) -> None:
    """Fit knobs to measured step times.

    The result is for --knobs of the other commands.  STEPS.csv has a line a step: model,batch,ms,
    and where they matter seq, kv, phase, dtype, image_size.  RUN.json.gz is what `rooftrace
    measure` wrote.
    """
    from rooftrace.costmodels.knobs import dump_knobs
    from rooftrace.costmodels.profiles.steps import read_steps
    from rooftrace.reporting.calibrating import (
        calibrate_run,
        calibrate_steps,
        render_calibration,
    )
    from rooftrace.tracer.graphfile import write_bytes
    from rooftrace.tracer.runfile import load_run

    (loaded,) = _chips((chip,))
    is_run = steps.endswith((".json", ".json.gz"))
    measured: Any = load_run(steps) if is_run else read_steps(steps)
    with _progress() as tell:
        if is_run:
            found = calibrate_run(measured, loaded, execution, start, free, title, tell)
        else:
            found = calibrate_steps(measured, loaded, execution, target, start, free, title, tell)
    text = dump_knobs(found.fit.knobs)
    if out == "-":
        click.echo(text, nl=False)
        return
    write_bytes(Path(out), text.encode())
    _console().print(render_calibration(found))
    click.echo(f"\nwritten to {out}; use it as --knobs {out}")


# -- what commands share --------------------------------------------------------------------------


def _graphs(
    target: str,
    tell: Callable[[str], None],
    dtype: str | None,
    weights_dtype: str | None,
    kv_dtype: str | None,
    only_unsaved: bool = False,
    **request: Any,
) -> Mapping[str, OpGraph]:
    """Trace (or load) a target and re-price it.

    A saved graph has its sizes: --batch and its like are refused, or left to others (only_unsaved).
    """
    from rooftrace.costmodels.rewrite import check_precisions, reprice
    from rooftrace.tracer.api import trace_target
    from rooftrace.tracer.graphfile import looks_saved

    check_precisions(dtype, weights_dtype, kv_dtype)
    graphs: Mapping[str, OpGraph]
    if looks_saved(target):
        sized = any(request[name] is not None for name in ("batch", "seq", "kv"))
        if (sized or request["inputs"]) and not only_unsaved:
            raise click.UsageError(
                f"{target}: a saved graph has its sizes; leave out --batch, --seq, --kv, --input"
            )
        graphs = trace_target(target, request["phases"])
    else:
        phases, sizes, options = _request(dtype=dtype, weights_dtype=weights_dtype, **request)
        graphs = trace_target(target, phases, sizes, options, tell)
    return {
        phase: reprice(graph, dtype, weights_dtype, kv_dtype) for phase, graph in graphs.items()
    }


def _request(
    phases: tuple[str, ...] | None,
    batch: int | None,
    seq: int | None,
    kv: int | None,
    inputs: Sequence[str],
    optimizer: str,
    assumed: Sequence[str],
    repeats: bool,
    trust_remote_code: bool,
    dtype: str | None = None,
    weights_dtype: str | None = None,
    kv_dtype: str | None = None,
) -> tuple[tuple[str, ...] | None, Request, Options]:
    """The workload options as the tracer takes them: phases, sizes, how to trace."""
    from rooftrace.tracer.request import Options, Request, parse_assumption

    named = {}
    for item in inputs:
        name, equals, text = item.partition("=")
        if not equals:
            raise click.UsageError(
                f"--input {item!r}: expected NAME=SHAPE:DTYPE, for example x=8,3,224,224:fp32"
            )
        named[name] = text
    assume = dict(map(parse_assumption, assumed))
    options = Options(
        optimizer=optimizer, dtype=dtype or weights_dtype, assume=assume, repeats=repeats
    )
    return phases, Request(batch, seq, kv, named, trust_remote_code), options


def _largest_batch(
    target: str,
    chips: Sequence[Chip],
    tell: Callable[[str], None],
    dtype: str | None,
    weights_dtype: str | None,
    kv_dtype: str | None,
    **request: Any,
) -> Mapping[str, Mapping[str, LargestBatch]]:
    """The largest batch that fits each chip, by phase."""
    from rooftrace.reporting.api import largest_batch

    request["batch"] = None
    phases, sizes, options = _request(dtype=dtype, weights_dtype=weights_dtype, **request)
    return largest_batch(
        target,
        chip=chips,
        phases=phases,
        request=sizes,
        options=options,
        dtype=dtype,
        weights_dtype=weights_dtype,
        kv_dtype=kv_dtype,
        progress=tell,
    )


def _chips(names: Sequence[str]) -> list[Chip]:
    from rooftrace.hardware.chipfile import load_chip

    if not names:
        raise click.UsageError("--chip: expected at least one chip")
    return [load_chip(name) for name in names]


def _executions(names: Sequence[str], tf32: bool, knobs: str | None) -> list[ExecutionModel]:
    from rooftrace.costmodels.execution import execution_model
    from rooftrace.costmodels.knobs import load_knobs

    if not names:
        raise click.UsageError("--execution: expected at least one execution model")
    changes: dict[str, Any] = {"tf32": True} if tf32 else {}
    if knobs is not None:
        changes["knobs"] = load_knobs(knobs)
    return [execution_model(name, **changes) for name in names]


def _load_rules(paths: Sequence[str]) -> None:
    import runpy

    for path in paths:
        if not Path(path).is_file():
            raise click.UsageError(f"--rules {path!r}: there is no such file")
        runpy.run_path(path)


def _to_stdout(result: Any, form: str) -> None:
    if form == "json":
        click.echo(json.dumps(result.to_dict(), indent=1, allow_nan=False))
    elif form == "csv":
        click.echo(result.to_frame().to_csv(index=False, lineterminator="\n"), nl=False)
    else:
        from rooftrace.reporting.markdown import markdown

        click.echo(markdown(result, ()), nl=False)


def _write_text(
    form: str,
    out: str | None,
    rendered: Callable[[], Any],
    markdown: Callable[[], str],
    document: Callable[[], Any],
) -> None:
    """A result to the terminal, or as markdown or JSON to stdout or a file."""
    from rooftrace.tracer.graphfile import write_bytes

    if form == "terminal" and out in (None, "-"):
        _console().print(rendered())
        return
    text = json.dumps(document(), indent=1) + "\n" if form == "json" else markdown()
    if out in (None, "-"):
        click.echo(text, nl=False)
    else:
        write_bytes(Path(str(out)), text.encode())


def _console() -> Any:
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=100, highlight=False)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A spinner on stderr that says what is being done, where stderr is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("starting") as status:
        yield lambda text: status.update(text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; every wrong request ends in one clear message and exit code 2."""
    try:
        cli.main(
            args=list(arguments) if arguments is not None else None,
            prog_name="rooftrace",
            standalone_mode=False,
        )
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except BrokenPipeError:
        # The reader of our output has gone (| head): nothing is wrong.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except (ValueError, LookupError, RuntimeError, OSError) as error:
        if not (isinstance(error, OSError) or type(error).__module__.startswith("rooftrace.")):
            raise
        sys.stderr.write(f"rooftrace: {_message(error)}\n")
        sys.exit(2)


def run() -> None:
    """The installed command: as `main`, and over at once.

    Python takes down object by object what the end of the process frees anyway, and needs seconds
    for a large model.
    """
    code: Any = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code or 0)


def _message(error: BaseException) -> str:
    if (
        isinstance(error, OSError)
        and error.strerror
        and not type(error).__module__.startswith("rooftrace.")
    ):
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, LookupError) and error.args:
        return str(error.args[0])
    return str(error)
