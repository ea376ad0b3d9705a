"""Options that several commands have: what is run, how it is priced, where the result goes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import click

from rooftrace._formats import FIGURES, Holds, names as names_of_formats
from rooftrace.costmodels.execution import REWRITES
from rooftrace.errors import RequestError, hint
from rooftrace.reporting.cli.outputs import Output
from rooftrace.reporting.cli.scripted import priced_as_run
from rooftrace.tracer.asking import names
from rooftrace.tracer.pipelines import SCHEDULES

TARGET_HELP = f"""TARGET is package.module:attr or path/file.py:attr (a module, or a function
returning a module or (module, inputs)), the path of a Hugging Face config.json, hf:ORG/NAME, a
saved graph, an exported program (.pt2, .onnx), a script with its arguments in one word ("train.py
--batch_size=12", or run:COMMAND), or the name of a config that comes along:
{", ".join(names.configs())}."""


class Commas(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks only
    """A comma-separated list."""

    name = "LIST"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(part.strip() for part in str(value).split(",") if part.strip())


_MOST_DIGITS = 18
"""A size of more digits is a slip; Python itself reads no more than 4300."""


def _whole(text: str) -> int | None:
    """A whole number in digits alone, or None."""
    text = text.strip()
    plain = text.isdecimal() and text.isascii() and len(text) <= _MOST_DIGITS
    return int(text) if plain else None


class SizesByName(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks only
    """Sizes by name, between commas: dp=4,tp=8."""

    name = "SIZES"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, int]:
        if isinstance(value, dict):
            return value
        sizes = {}
        for part in str(value).split(","):
            axis, _, size = part.partition("=")
            whole = _whole(size)
            if not axis.strip() or whole is None or axis.strip() in sizes:
                raise RequestError(
                    f"--mesh {value}: expected one size for each axis, for example dp=4,tp=8"
                )
            sizes[axis.strip()] = whole
        return sizes


_MESH = (
    click.option(
        "--mesh",
        type=SizesByName(),
        metavar="AXIS=N,...",
        help="Spread it over processes, for example dp=32,tp=8.  A Hugging Face model takes "
        "the plans of transformers (dp, dp_replicate, tp, ep); code shards itself in a "
        "function build(mesh).",
    ),
    click.option(
        "--checkpoint",
        type=click.Choice(names.CHECKPOINTS),
        help="Which activations of a Hugging Face model training makes again.",
    ),
    click.option(
        "--schedule",
        help=f"Order of the work of a pipeline (--mesh pp=...): {', '.join(SCHEDULES)}.  "
        "Default: 1f1b.",
    ),
    click.option(
        "--microbatches",
        type=int,
        help="Microbatches of --batch each that a step of a pipeline has.  Default: 2 for each "
        "stage.",
    ),
)


_NARROWER = (
    click.option("--weights-dtype", help="Price weights in this precision."),
    click.option("--kv-dtype", help="Price the KV cache in this precision."),
)
_REPEATS = click.option(
    "--repeats/--no-repeats",
    default=True,
    show_default=True,
    help="Trace equal layers once, and list them once.",
)
_TORCH = click.option(
    "--torch",
    metavar="RELEASE",
    help="The release of PyTorch that runs the step, for example 2.8: it decides which ops are one "
    "kernel on CUDA.  Default: the installed one.",
)


class SizeList(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks only
    """One size, or several between commas."""

    name = "LIST"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | tuple[int, ...]:
        if isinstance(value, (int, tuple)):
            return value
        sizes = [_whole(part) or 0 for part in str(value).split(",")]
        if 0 in sizes:
            option = param.opts[0] if param is not None else "size"
            raise RequestError(
                f"{option} {value}: expected whole numbers above 0 between commas, for example "
                "1,2,4,8"
            )
        return sizes[0] if len(sizes) == 1 else tuple(sizes)


def workload_options(
    command: Callable[..., Any] | None = None, *, sizes: Any = int
) -> Callable[..., Any]:
    """--batch, --seq, --phase, --dtype ...: what is run.  sizes: the type of batch, seq and kv."""
    if command is None:
        return partial(workload_options, sizes=sizes)
    options = (
        click.option(
            "--phase",
            "phases",
            type=Commas(),
            help="forward, training, prefill, decode, requests; default: those that fit the model.",
        ),
        click.option(
            "--batch", type=sizes, help="Batch size; default 1, or the batch of the inputs."
        ),
        click.option("--seq", type=sizes, help="Sequence (prompt) length in tokens."),
        click.option(
            "--kv", type=sizes, help="Cached length before a decode step; default: --seq."
        ),
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
        *_NARROWER,
        *_MESH,
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
            "routing@*.gate=skewed:1.0.  Repeatable.",
        ),
        _REPEATS,
        _TORCH,
        click.option(
            "--trust-remote-code",
            is_flag=True,
            help="Let a Hugging Face repository run its own code.",
        ),
    )
    return _with(command, *options)


_MOST_LISTED = 1 << 17
"""Equal requests that are listed; a step takes less."""


class Lengths(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks only
    """Whole numbers between commas, from 0 on; 8x64 is 64, eight times."""

    name = "LIST"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        numbers: list[int] = []
        for part in str(value).split(","):
            count, times, number = part.strip().rpartition("x")
            repeats, length = _whole(count) if times else 1, _whole(number)
            if repeats is None or length is None:
                option = param.opts[0] if param is not None else "lengths"
                raise RequestError(
                    f"{option} {value}: expected a whole number for each request, for example "
                    "4096,100,0 or 8x4096,0"
                )
            numbers += [length] * min(repeats, _MOST_LISTED)
        return tuple(numbers)


def requests_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--cached and --new: requests of one step, each with its length."""
    return _with(
        command,
        click.option(
            "--cached",
            type=Lengths(),
            help="A step of requests of different lengths: positions in the cache of each, for "
            "example 8x4096,100,0.",
        ),
        click.option(
            "--new",
            type=Lengths(),
            help="New tokens of each of these requests, or of all; default 1.",
        ),
    )


rules_option = click.option(
    "--rules",
    multiple=True,
    metavar="FILE.py",
    help="Python file that adds rules, joins, sections, sources or phases.  Repeatable.",
)


def pricing_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--knobs, --rewrite, --tf32, --rules: how it is priced."""
    options = (
        click.option(
            "--knobs",
            metavar="FILE",
            default="typical",
            show_default=True,
            help="Constants of real kernels: typical ones of the chip's kind, a calibrated TOML "
            "file, or none (datasheet peaks, so that times are bounds).",
        ),
        click.option(
            "--rewrite",
            "rewrites",
            type=Commas(),
            default=(),
            help="What a server runs in place of the module, in every execution model: "
            f"{', '.join(REWRITES)}.",
        ),
        click.option("--tf32", is_flag=True, help="Run fp32 matrix products on the matrix engine."),
        rules_option,
    )
    return _with(command, *options)


def measured_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--chip, --execution, --target, --trust-targets: what measurements are of."""
    return _with(
        command,
        click.option("--chip", required=True, help="The chip that the steps were measured on."),
        click.option("--execution", default="eager", show_default=True, help=_HOW),
        *_WHAT,
    )


def calibration_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--chip and --execution, which a run says itself, --target, --trust-targets."""
    return _with(
        command,
        click.option(
            "--chip",
            help="The chip that the steps were measured on; default with --run: this device, "
            "measured now.",
        ),
        click.option("--execution", help=f"{_HOW}  Default: eager."),
        *_WHAT,
    )


_HOW = "How the steps were run: eager, compiled, efficient (one CUDA graph), serving."
_WHAT = (
    click.option(
        "--target",
        metavar="TARGET|TEMPLATE",
        help="What was run.  With a trace: a TARGET.  With a table: a template that makes a "
        "TARGET of each name in it, for example models.py:{target}.  A run of the suite needs "
        "none.",
    ),
    click.option(
        "--trust-targets",
        is_flag=True,
        help="Import and call what the file of measurements names: only for a file that you "
        "trust as you trust code.",
    ),
)


def _with(command: Callable[..., Any], *options: Callable[..., Any]) -> Callable[..., Any]:
    """A command with these options, in this order."""
    for option in reversed(options):
        command = option(command)
    return command


EXECUTIONS = "naive, eager, compiled, mixed, efficient, serving, seed-naive, seed-efficient"


_USUAL_CHIP = "that of --knobs, else h200-sxm"


def chip_option(help: str = "A chip by name or TOML path.") -> Callable[..., Any]:
    """--chip: one."""
    return click.option("--chip", show_default=_USUAL_CHIP, help=help)


def chips_option(help: str = "Chips by name or TOML path.") -> Callable[..., Any]:
    """--chip: one or several, as `chips`."""
    return click.option("--chip", "chips", type=Commas(), show_default=_USUAL_CHIP, help=help)


system_option = click.option(
    "--system",
    "systems",
    type=Commas(),
    default=(),
    help="How chips are joined, for --mesh: systems by name or TOML path, in place of --chip "
    "(rooftrace systems list).",
)


_WHAT_IFS = ("interference", "stragglers", "expert-imbalance")


class Numbers(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks only
    """Numbers by name, between commas: stragglers=0.02,interference=0.1."""

    name = "NUMBERS"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, float]:
        if isinstance(value, dict):
            return value
        numbers = {}
        for part in str(value).split(","):
            name, _, text = part.partition("=")
            plain = name.strip().replace("_", "-")
            try:
                numbers[plain.replace("-", "_")] = float(text)
            except ValueError:
                plain = ""
            if plain not in _WHAT_IFS:
                raise RequestError(
                    f"--what-if {value}: expected a number for {', '.join(_WHAT_IFS)}, for "
                    f"example stragglers=0.02{hint(plain, _WHAT_IFS)}"
                )
        return numbers


what_if_option = click.option(
    "--what-if",
    "disturbances",
    type=Numbers(),
    metavar="NAME=NUMBER,...",
    help="What slows a step of many processes: interference (share by which computing slows "
    "beside an exchange), stragglers (spread of chips, over the mean), expert-imbalance "
    "(tokens of the busiest, over the mean).",
)

exchange_option = click.option(
    "--exchange",
    default="as-run",
    show_default=True,
    help="How rows go to the experts of other processes (--mesh ep=...): as-run, or by the "
    "measured kernels of DeepEP: deepep, deepep-low-latency.",
)


def execution_option(default: str = "efficient") -> Callable[..., Any]:
    """--execution: one."""
    option = click.option("--execution", default=default, show_default=True, help=f"{EXECUTIONS}.")
    return lambda command: option(priced_as_run(command))


def executions_option(default: str = "efficient") -> Callable[..., Any]:
    """--execution: one or several, as `executions`."""
    option = click.option(
        "--execution",
        "executions",
        type=Commas(),
        default=default,
        show_default=True,
        help=f"{EXECUTIONS}.",
    )
    return lambda command: option(priced_as_run(command))


class FigureFile(Output):
    """The path of a figure: PNG, SVG or PDF by its ending, which is checked before any work."""

    name = "FILE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        path = str(value)
        if not path.lower().endswith(tuple(f".{form}" for form in FIGURES)):
            option = param.opts[0] if param is not None else "--plot"
            raise RequestError(f"{option} {path}: expected a file that ends in .png, .svg or .pdf")
        return path


class TimelineFile(Output):
    """The path of a timeline, which is checked before any work."""

    name = "FILE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        path = str(value)
        if not path.endswith((".json", ".json.gz")):
            raise RequestError(f"--timeline {path}: expected a file that ends in .json or .json.gz")
        return path


timeline_option = click.option(
    "--timeline",
    type=TimelineFile(),
    metavar="FILE.json.gz",
    help="Write the predicted timeline of the steps there; it opens in ui.perfetto.dev.",
)


def plot_option(help: str) -> Callable[..., Any]:
    """--plot: a figure of the result."""
    return click.option("--plot", type=FigureFile(), metavar="FILE.png|svg|pdf", help=help)


style_option = click.option(
    "--style",
    type=click.Choice(["screen", "paper", "paper-column"]),
    default="screen",
    show_default=True,
    help="What figures are made for: paper is 7.2 in wide, paper-column 3.5 in, with type of 7 to "
    "9 points.",
)


def table_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--format with csv, --out: one text or table, to the terminal or a file."""
    return _with(command, *_output("page", "data", "rows"))


def output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--format, --out: one text, to the terminal or a file."""
    return _with(command, *_output("page", "data"))


def page_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--format without data, --out: a table of what comes along."""
    return _with(command, *_output("page"))


def _output(*holds: Holds) -> tuple[Callable[..., Any], ...]:
    forms = ("terminal", *names_of_formats(*holds))
    return (
        click.option(
            "--format",
            "form",
            type=click.Choice(forms),
            help="Default: terminal, or by the ending of --out.",
        ),
        click.option(
            "-o",
            "--out",
            type=Output(forms=forms),
            metavar="FILE",
            help="Write there instead of the terminal; - is stdout.",
        ),
    )
