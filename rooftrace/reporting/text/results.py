"""Any result in words, on every output; an output is one function of a view.

`view_of` says what stands there.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rooftrace.reporting.text.dispatch import view_of
from rooftrace.reporting.view import as_page, as_screen, model as view

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH = 100


def as_text(result: Any, width: int = WIDTH) -> str:
    """What a terminal of this width shows of a result, without colours: print(result)."""
    made = renderable(result)
    from rich.console import Console

    console = Console(
        file=io.StringIO(),
        width=width,
        color_system=None,
        legacy_windows=False,
        force_jupyter=False,  # else it shows HTML there, and the text stays empty
    )
    console.print(made)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in lines)


def renderable(result: Any) -> RenderableType:
    """A result for rich to print: on one screen, in colours."""
    return as_screen(_view(result, "screen"))


def as_html(result: Any) -> str:
    """A result in a cell of a notebook: what a screen shows, and one figure."""
    from rooftrace.reporting.figures import figure_of
    from rooftrace.reporting.hypertext import as_cell

    return as_cell(_view(result, "screen"), figure_of(result))


def shown(result: Any, form: str, **how: Any) -> Any:
    """A result as "text" (print), for "rich", as "html" (a notebook), a "webpage" or "latex".

    "latex tables" are its tables alone, by the names of their files.
    how: further arguments of the function that makes it.
    """
    outputs: dict[str, Callable[..., Any]] = {
        "text": as_text,
        "rich": renderable,
        "html": as_html,
        "webpage": as_webpage,
        "latex": latex_of,
        "latex tables": latex_tables,
    }
    return outputs[form](result, **how)


def as_markdown(result: Any, files: Collection[str] = ()) -> str:
    """A result as a GitHub-flavoured page.  files: the names of the figures that it may show."""
    return as_page(_view(result, "page"), files)


def as_webpage(result: Any, pictures: Mapping[str, bytes] | None = None) -> str:
    """A result as one file of HTML that needs no network; of a report, what can be explored too.

    pictures: PNGs by the names of the images that show them.
    """
    from rooftrace.reporting.hypertext import report_page, result_page
    from rooftrace.reporting.sections import Results

    return (
        report_page(result)
        if isinstance(result, Results)
        else result_page(_view(result, "page"), pictures)
    )


def latex_of(result: Any, files: Collection[str] = (), style: str = "screen") -> str:
    """A result as a LaTeX document.  files: names of the figures that it may show.

    style: what its tables are made for ("screen", "paper", "paper-column"); RequestError for
    another one.
    """
    from rooftrace.reporting.latex import as_latex

    return as_latex(_view(result, "page"), files, style)


def latex_tables(result: Any, style: str = "screen") -> dict[str, str]:
    """Each table of a result as a file that a paper takes in, by the name of the file."""
    from rooftrace.reporting.latex import table_files

    return table_files(_view(result, "page"), style)


_REGISTERING = {
    "rooftrace.measured": "measurements",
    "rooftrace.measured.live": "loops",
    "rooftrace.costmodels.sweeping": "sweeps",
    "rooftrace.reporting.fleetsweeps": "fleets",
    "rooftrace.reporting.rooflinesteps": "rooflines",
    "rooftrace.costmodels.explaining": "explanations",
    "rooftrace.costmodels.elasticity": "sensitivities",
    "rooftrace.costmodels.exploring": "explorations",
    "rooftrace.costmodels.answers": "answers",
    "rooftrace.costmodels.meshing": "meshes",
    "rooftrace.costmodels.disaggregating": "disaggregations",
    "rooftrace.costmodels.breaking": "graphbreaks",
    "rooftrace.costmodels.scripting": "scripts",
}
"""Modules of this package that load numpy, or code about measured time: by whose results they show.

A report of predictions loads none of them.
"""


def _view(result: Any, output: view.Output) -> view.View:
    for owner, name in _REGISTERING.items():
        if type(result).__module__.startswith(owner):
            import_module(f"rooftrace.reporting.text.{name}").register()
    return view_of(result, output)
