"""Code that commands share: writing of results and timelines, their options, and progress."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from traceback import format_exception
from types import MappingProxyType
from typing import Any

import click

import rooftrace as rt
from rooftrace._escapes import visible
from rooftrace._formats import FORMATS, Holds, names
from rooftrace._progress import WARNING, tell
from rooftrace.errors import SLIP, near
from rooftrace.reporting.cli.options import (
    FORCE,
    SECTIONS,
    TARGET_HELP,
    TRACEBACK,
    OutputPath,
    call_options,
    checked_outputs,
    click_option,
    complain,
    form_by_ending,
    form_option,
    load_rules,
    out_option,
    plot_option,
    say,
    section_of,
    style_option,
    timeline_option,
    typed,
)


def console() -> Any:
    """The console of the terminal view: as wide as the terminal, 100 columns in a file."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=100, highlight=False)


@contextlib.contextmanager
def progress(kept: re.Pattern[str] | None = None) -> Iterator[None]:
    """Show messages of the calls inside as a spinner on stderr, where that is a terminal.

    Elsewhere the last message is a line every `_EVERY` seconds.  kept: messages that match stay as
    a line in both.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)

    def is_kept(text: str) -> bool:
        return text.startswith(WARNING) or (kept is not None and kept.fullmatch(text) is not None)

    begin = time.monotonic()
    if not console.is_terminal:
        doing, done = ["starting"], threading.Event()

        def hear(text: str) -> None:
            doing[0] = text
            if is_kept(text):
                complain(text, who="")

        def write() -> None:
            while not done.wait(_EVERY):
                complain(f"{doing[0]} ({time.monotonic() - begin:.0f} s)", who="")

        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        try:
            with rt.tools.telling(hear):
                yield
        finally:
            done.set()
            writer.join()
        return

    class Doing:
        """The message, with seconds and memory at the time of drawing."""

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

    with console.status(Doing("starting")) as status, rt.tools.telling(show):
        yield


_SOON, _EVERY = 2.0, 10.0
"""Seconds after which seconds and memory are shown, and from line to line in a file or a pipe."""


def _memory() -> str:
    """Memory of this process and its children, from Linux; empty on other systems."""
    try:
        tasks = Path("/proc/self/task").iterdir()
        children = " ".join((task / "children").read_text() for task in tasks)
        sizes = (Path("/proc", p, "statm").read_text() for p in ("self", *children.split()))
        pages = sum(int(size.split()[1]) for size in sizes)
    except (OSError, ValueError, IndexError):  # another system, or a child that has just ended
        return ""
    return f", {pages * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"


def rendered(result: Any, form: str, **how: Any) -> Any:
    """A result in a format.  Numbers that only tables have are computed here, which may be slow."""
    from rooftrace.reporting.views import shown

    with progress():
        tell("making the tables")
        return shown(result, form, **how)


@contextlib.contextmanager
def once() -> Iterator[None]:
    """Progress of a command whose result is its last work: no garbage collection until its end.

    Each collection would go through all objects of the result, for seconds if they are many.
    """
    from rooftrace.tracer.phases import collector_paused

    atexit.register(gc.unfreeze)  # objects that `keep` set aside are freed at the end too
    click.get_current_context().with_resource(collector_paused(keep=True))
    with progress():
        yield


# -- output ----------------------------------------------------------------------------------------
# The output of a command: --format, --out, --plot, --style and --timeline.


@dataclass(frozen=True, kw_only=True)
class CommandOutput:
    """The output that a command line asks for; form: None is by the ending of `out`."""

    form: str | None = None
    out: str | None = None
    plot: str | None = None
    style: str = "screen"
    timeline: str | None = None

    @property
    def format(self) -> str:
        """The format of the result: "terminal" or one of FORMATS."""
        if self.form is not None or self.out in (None, "-"):
            return self.form or "terminal"
        return form_by_ending(str(self.out))

    def write(
        self,
        result: Any,
        *,
        document: Callable[[], dict[str, Any]] | None = None,
        drawn: str = "drawn",
        of: Any = None,
        **how: Any,
    ) -> bool:
        """Write a result to the terminal, to stdout or to a file, and its timeline.

        document: the data of JSON; default `to_dict`.  of: the source of the timeline; default the
        result.  how: of `rt.tools.save_timeline`.  Returns whether it was the terminal.
        """
        from rooftrace._writing import write_bytes

        on_terminal = self.format == "terminal" and self.out in (None, "-")
        if on_terminal:
            console().print(rendered(result, "rich"))
            if self.plot is not None:
                say(f"\n{drawn} to {self.plot}")
        else:
            form = "md" if self.format == "terminal" else self.format
            text = rendered(result, form, style=self.style, document=document)
            if self.out in (None, "-"):
                click.echo(text, nl=False)
            else:  # the mark lets a later command replace the file
                marked = f"{text}{FORMATS[form].mark}"
                write_bytes(Path(str(self.out)), marked.encode("utf-8", "backslashreplace"))
        self.write_timeline(result if of is None else of, quiet=not on_terminal, **how)
        return on_terminal

    def write_timeline(self, result: Any, quiet: bool = False, **how: Any) -> None:
        """Write the timeline of a result, where --timeline names a file.

        quiet: print nothing, as stdout holds a document.  how: of `rt.tools.save_timeline`.
        """
        if self.timeline is None:
            return
        with progress():
            rt.tools.save_timeline(result, self.timeline, **how)
        if not quiet:
            say(f"\ntimeline written to {self.timeline}; open it in ui.perfetto.dev")


def results(
    *holds: Holds, plot: str = "", style: bool = False, timeline: str | bool = False
) -> list[click.Option]:
    """The options of a command that writes a result.

    holds: contents of its formats other than pages.  plot, timeline: their help; True: the usual.
    """
    forms = names("page", *holds)
    return [
        *([plot_option(plot)] if plot else []),
        *([style_option()] if style else []),
        *([timeline_option(timeline)] if timeline else []),
        form_option(forms),
        out_option(OutputPath(forms=("terminal", *forms))),
    ]


# -- command ---------------------------------------------------------------------------------------


class Command(click.Command):
    """A command with --traceback; if it writes files, --force, and a check of them at its start.

    functions: the public functions whose options it has.  Its callback then takes `arguments`,
    those that the user typed by name; the files of --rules have run, unless run_rules is False.
    defaults, helps: the default and the help of such an option that the command says otherwise.
    results: its options of `results`; its callback then takes `output`.
    """

    def __init__(
        self,
        *args: Any,
        functions: Sequence[str] = (),
        run_rules: bool = True,
        defaults: Mapping[str, str] = MappingProxyType({}),
        helps: Mapping[str, str] = MappingProxyType({}),
        results: Sequence[click.Option] = (),
        **how: Any,
    ) -> None:
        super().__init__(*args, **how)
        self.options = call_options(functions, defaults, helps)
        self.run_rules, self.results = run_rules, results
        self.params += [*map(click_option, self.options.values()), *results, TRACEBACK]
        self.outputs = {p.name or "": p.type for p in self.params if isinstance(p.type, OutputPath)}
        if self.outputs:
            self.params.append(FORCE)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            every = [name for option in self.params for name in option.opts if name[:1] == "-"]
            close = near(error.option_name, every, SLIP)
            text = None
            places = [p.human_readable_name for p in self.params if isinstance(p, click.Argument)]
            if places and not close:
                text = f"{error.message} Arguments without an option: {', '.join(places)}."
            raise click.NoSuchOption(
                error.option_name, text, [close] if close else None, ctx
            ) from None

    def invoke(self, ctx: click.Context) -> Any:
        values = dict(ctx.params)
        traceback, force = values.pop("traceback"), values.pop("force", False)
        with checked_outputs(self.outputs, values, force) if self.outputs else nullcontext():
            try:
                return self.callback and ctx.invoke(self.callback, **self._taken(ctx, values))
            except (ValueError, LookupError, RuntimeError, OSError) as error:
                for line in format_exception(error.__cause__ or error) if traceback else ():
                    complain(line.removesuffix("\n"), who="")
                raise

    def _taken(self, ctx: click.Context, values: dict[str, Any]) -> dict[str, Any]:
        """The values of options as the callback takes them; files of --rules run here."""
        if self.options:
            arguments = typed(ctx, self.options)
            if self.run_rules:
                load_rules(arguments.pop("rules", ()))
            values = {name: value for name, value in values.items() if name not in self.options}
            values["arguments"] = arguments
        if self.results:
            values["output"] = CommandOutput(
                **{str(o.name): values.pop(o.name) for o in self.results}
            )
        return values

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Options", *SECTIONS)}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx)
            if record is not None and isinstance(option, click.Option):
                sections[section_of(option)].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def command(
    *functions: str, epilog: str | None = TARGET_HELP, **how: Any
) -> Callable[[Callable[..., Any]], Command]:
    """Make a Command of a callback.  how: of `Command`."""
    return click.command(cls=Command, functions=functions, epilog=epilog, **how)
