"""What commands share: from option values to graphs, chips and executions; writing a result."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click

import rooftrace as rt
from rooftrace._escapes import visible
from rooftrace._formats import FORMATS
from rooftrace._progress import WARNING, tell
from rooftrace.reporting.cli.output import complain, say
from rooftrace.reporting.cli.outputs import form_by_ending

Made = TypeVar("Made")


def write_document(out: str, form: str, text: str) -> None:
    """A text to a file, with the mark by which a later command knows that it may replace it."""
    from rooftrace._writing import write_bytes

    marked = f"{text}{FORMATS[form].mark}"
    write_bytes(Path(out), marked.encode("utf-8", "backslashreplace"))


def write_result(
    result: Any,
    form: str | None,
    out: str | None,
    *,
    table: Callable[[], str] | None = None,
    style: str = "screen",
    document: Callable[[], dict[str, Any]] | None = None,
) -> bool:
    """A result to the terminal, to stdout or to a file; whether it was the terminal.

    form: "terminal" or one of FORMATS; None: as `form_of` says.  table: the text of csv;
    default that of its rows.  style: what tables of tex are as wide as.  document: what json has;
    default that of `to_dict`.
    """
    from rooftrace.reporting.text import shown

    form = form_of(form, out)
    if form == "terminal" and out in (None, "-"):
        console().print(told(lambda: shown(result, "rich")))
        return True
    form = "md" if form == "terminal" else form
    make = table if form == "csv" else None
    text = told(make or (lambda: shown(result, form, style=style, document=document)))
    if out in (None, "-"):
        click.echo(text, nl=False)
    else:
        write_document(str(out), form, text)
    return False


def write_timeline(path: str | None, result: Any, quiet: bool = False, **how: Any) -> None:
    """The timeline of a result, where --timeline names a file.

    quiet: stdout holds a document, in which nothing else may stand.  how: of `rt.save_timeline`.
    """
    if path is None:
        return
    with progress():
        rt.save_timeline(result, path, **how)
    if not quiet:
        say(f"\ntimeline written to {path}; open it in ui.perfetto.dev")


def form_of(form: str | None, out: str | None) -> str:
    """The format of a result: what was asked for, else by the ending of its file."""
    if form is not None or out in (None, "-"):
        return form or "terminal"
    return form_by_ending(str(out))


def console() -> Any:
    """Where the terminal view goes: as wide as the terminal, 100 columns in a file."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=100, highlight=False)


@contextlib.contextmanager
def progress(kept: re.Pattern[str] | None = None) -> Iterator[None]:
    """A spinner on stderr that says what the calls inside do, where stderr is a terminal.

    kept: what is said like this stays there as a line of its own, also in a file.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)

    def is_kept(text: str) -> bool:
        return text.startswith(WARNING) or (kept is not None and kept.fullmatch(text) is not None)

    if not console.is_terminal:
        with rt.telling(lambda text: complain(text, who="") if is_kept(text) else None):
            yield
        return

    begin = time.monotonic()

    class Doing:
        """What is being done, with seconds and memory as they are when it is drawn."""

        def __init__(self, text: str) -> None:
            self.text = text

        def __rich__(self) -> Text:
            taken = time.monotonic() - begin
            so_far = f" ({taken:.0f} s{_memory()})" if taken > _SOON else ""
            return Text(visible(self.text) + so_far)  # a plain str would be markup

    def show(text: str) -> None:
        if is_kept(text):
            console.print(Text(visible(text)))
        else:
            status.update(Doing(text))

    with console.status(Doing("starting")) as status, rt.telling(show):
        yield


_SOON = 2.0
"""Seconds that nobody asks about."""


def _memory() -> str:
    """The memory that this process and its children take, where Linux tells it."""
    try:
        tasks = Path("/proc/self/task").iterdir()
        children = " ".join((task / "children").read_text() for task in tasks)
        sizes = (Path("/proc", p, "statm").read_text() for p in ("self", *children.split()))
        pages = sum(int(size.split()[1]) for size in sizes)
    except (OSError, ValueError, IndexError):  # another system, or a child that has just ended
        return ""
    return f", {pages * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"


def told(make: Callable[[], Made]) -> Made:
    """What is shown of a result.  Numbers that only tables have are made here: it may take long."""
    with progress():
        tell("making the tables")
        return make()


@contextlib.contextmanager
def once() -> Iterator[None]:
    """Progress of a command that ends with what it makes inside: until then, nothing is collected.

    Each collection would go through all that was made, for seconds where that is much.
    """
    from rooftrace.tracer.sources import collector_paused

    atexit.register(gc.unfreeze)  # objects that `keep` set aside are freed at the end too
    click.get_current_context().with_resource(collector_paused(keep=True))
    with progress():
        yield
