"""The command line.

Exit codes: 0 good; 1 a check failed, or stdout took no more; 2 a wrong request (one line says how);
130 stopped by the user; 141 the reader of stdout closed it (`| head`), without a message.

Only click is imported up front, so that `--help` answers at once: commands import what they need.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from rooftrace._processes import ONE_TASK, with_stack
from rooftrace.errors import UnusedError, is_ours
from rooftrace.reporting.cli.device_commands import calibrate, chips, measure, systems, validate
from rooftrace.reporting.cli.diff_command import diff, inventory
from rooftrace.reporting.cli.gate_commands import check, lock
from rooftrace.reporting.cli.model_commands import compare, report, run_script, trace
from rooftrace.reporting.cli.options import StdoutError, checked_stdout, complain
from rooftrace.reporting.cli.step_commands import (
    breaks,
    explain,
    roofline,
    sensitivity,
    solve,
    sweep,
)
from rooftrace.reporting.commands.calls import CALLS

__all__ = ["cli", "main", "run"]


_COMMANDS: Mapping[str, Sequence[click.Command]] = {
    "Price a step": (report, run_script, roofline, sweep, trace),
    "Compare": (diff, compare),
    "Decide": (explain, sensitivity, solve, breaks),
    "Measure": (measure, calibrate, validate),
    "Gate a repository": (lock, check),
    "Look up": (chips, systems, inventory),
}
"""Commands by the question that they answer."""


class _Commands(click.Group):
    """All commands, by question on the first screen."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.commands))
        for title, commands in _COMMANDS.items():
            rows = [(f"{c.name or '':{width}}", c.get_short_help_str(200)) for c in commands]
            with formatter.section(title):
                formatter.write_dl(rows)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="rooftrace", message="rooftrace %(version)s")
def cli() -> None:
    """Price a training, prefill or decode step of any nn.Module on a chip; say what limits it.

    It needs no GPU, no weights and no adapter for a model.  Start with:

        rooftrace report gpt2 --batch 8 --seq 255 --chip h200-sxm
    """


for _command in (each for commands in _COMMANDS.values() for each in commands):
    cli.add_command(_command)


@with_stack
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; every wrong request ends in one clear message and exit code 2.

    stdout that is closed, full or broken ends in exit code 1 and one message.
    """
    ONE_TASK.append("command")
    try:
        with checked_stdout():
            _main(arguments)
    except StdoutError as error:
        if error.quiet:
            sys.exit(_PIPE)
        complain(f"cannot write to stdout: {error}")
        sys.exit(1)


_PIPE = 128 + 13
"""The exit code that a shell shows for a program that SIGPIPE ended."""


def _main(arguments: Sequence[str] | None) -> None:
    try:
        code = cli.main(
            args=list(arguments) if arguments is not None else None,
            prog_name="rooftrace",
            standalone_mode=False,
        )
        if isinstance(code, int):  # click returns the code of an Exit
            sys.exit(code)
    except (click.Abort, KeyboardInterrupt):
        complain("stopped")
        sys.exit(130)
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        complain(shown.getvalue().rstrip("\n"), who="")
        sys.exit(2)
    except (ValueError, LookupError, RuntimeError, OSError) as error:
        if not (isinstance(error, OSError) or is_ours(error)):
            raise
        complain(_message(error))
        sys.exit(2)


_QUIET = {"TRANSFORMERS_VERBOSITY": "error", "KINETO_LOG_LEVEL": "99"}
"""Variables that keep libraries from logging; read once, at import or at the first profile."""


def run() -> None:
    """The installed command: run `main`, then end the process at once.

    Otherwise Python first frees each object, which takes seconds for a large model.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    _end_orderly()
    code: Any = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code
    if code is not None and not isinstance(code, int):
        complain(str(code))
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()  # main has reported failed writes
    os._exit(code or 0)


def _end_orderly() -> None:
    """Let SIGTERM, and a terminal that closes, end this process as Ctrl-C does: it cleans up."""
    process = os.getpid()

    def end(number: int, frame: Any) -> None:
        if os.getpid() == process:
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)  # a fork of a script: as without rooftrace
        os.kill(os.getpid(), number)

    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, end)


_OPTIONS = {each.name: each.spelled.split("/")[-1] for each in CALLS["estimate"].options()}
"""Options by the names of arguments."""


def _message(error: BaseException) -> str:
    if isinstance(error, UnusedError):
        option = _OPTIONS.get(error.name, "--" + error.name.replace("_", "-"))
        value = "" if error.shown in ("True", "False") else f" {error.shown}"
        return f"{option}{value}: {error.reason}"
    if isinstance(error, OSError) and error.strerror and not is_ours(error):
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, LookupError) and error.args:
        return str(error.args[0])
    return str(error)
