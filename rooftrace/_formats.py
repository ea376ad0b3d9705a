"""The formats of results.  A new one is an entry of FORMATS and the function that it names.

Commands take their choices from FORMATS, files their renderer and their mark.  Functions are
imported when they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, TypeAlias

from rooftrace._outputs import MARK

Holds: TypeAlias = Literal["page", "data", "rows", "figure", "steps", "gate"]
"""The contents of a format: tables and sentences; all numbers; rows of one table; a drawing; the
kernels of a step; the result of a check of costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format by its name, which is also the ending of its files."""

    name: str
    holds: Holds
    # "module:function" of a result, which returns its text; of "steps", of a report and a folder,
    # which writes files there and returns their names.
    function: str = ""
    takes: tuple[str, ...] = ()  # further arguments of the function, by name
    mark: str = ""  # at the end of a file, so that a later command may replace it
    file: str = ""  # in the folder of a report
    usual: bool = False  # whether the folder of a report has it by default

    def __call__(self, result: Any, *arguments: Any, **how: Any) -> Any:
        """Call its function, with those arguments of `how` that it takes."""
        module, _, name = self.function.partition(":")
        function: Callable[..., Any] = getattr(import_module(f"rooftrace.reporting.{module}"), name)
        taken = {name: value for name, value in how.items() if name in self.takes}
        return function(result, *arguments, **taken)


_PAGE = f"\n[//]: # ({MARK})\n"
_FORMATS = (
    Format(
        name="md",
        holds="page",
        function="views.results:as_markdown",
        takes=("files",),
        mark=_PAGE,
        file="report.md",
        usual=True,
    ),
    Format(
        name="html",
        holds="page",
        function="views.results:as_webpage",
        takes=("pictures",),
        file="report.html",
        usual=True,
    ),
    Format(
        name="tex",
        holds="page",
        function="views.results:as_latex",
        takes=("files", "style"),
        file="report.tex",
    ),
    Format(
        name="json",
        holds="data",
        function="views.results:as_json",
        takes=("ascii", "document"),
        file="report.json",
        usual=True,
    ),
    Format(name="csv", holds="rows", function="views.results:as_csv", file="ops.csv", usual=True),
    Format(name="png", holds="figure", file="roofline.png", usual=True),
    Format(name="svg", holds="figure", file="roofline.svg"),
    Format(name="pdf", holds="figure", file="roofline.pdf"),
    Format(name="trace", holds="steps", function="figures.timeline:write_timelines"),
    Format(name="chakra", holds="steps", function="figures.chakra:write_traces"),
    Format(name="chakra-all", holds="steps", function="figures.chakra:write_traces_of_all"),
    Format(name="github", holds="gate", function="gates.reports:comment", mark=_PAGE),
    Format(name="gitlab", holds="gate", function="gates.reports:code_quality"),
    Format(name="junit", holds="gate", function="gates.reports:junit", mark=f"<!-- {MARK} -->\n"),
)
FORMATS: Mapping[str, Format] = {each.name: each for each in _FORMATS}


def names(*holds: Holds) -> tuple[str, ...]:
    """The names of the formats that hold one of these."""
    return tuple(name for name, each in FORMATS.items() if each.holds in holds)


TEXTS = names("page", "data", "rows")
"""The formats that hold any result as one text."""
FIGURES = names("figure")
USUAL = ("html", *(name for name, each in FORMATS.items() if each.usual and name != "html"))
"""The default formats of the folder of a report; the page that is read first comes first."""
OF_REPORTS = (*USUAL, *(n for n in names("figure", "steps", "page") if n not in USUAL))
