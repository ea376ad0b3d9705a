"""Any result on any output: each output is one function of its view (`view_of`)."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rooftrace._escapes import to_csv, to_json
from rooftrace._formats import FORMATS
from rooftrace._outputs import MADE_BY
from rooftrace.reporting.renderers import as_page, as_screen, view

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rooftrace.costmodels.estimates import Estimate

WIDTH = 100


def as_text(result: Any, width: int = WIDTH) -> str:
    """A result as a terminal of this width shows it, without colours: print(result)."""
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
    """A result for rich to print: a screen, in colours."""
    return as_screen(view_of(result, "screen"))


def as_cell(result: Any) -> str:
    """A result in a cell of a notebook: the view of a screen, and a figure."""
    from rooftrace.reporting.figures import figure_of
    from rooftrace.reporting.html import as_cell as hypertext_as_cell

    return hypertext_as_cell(view_of(result, "screen"), figure_of(result))


def shown(result: Any, form: str, **how: Any) -> Any:
    """A result as "text" (print), for "rich", as the "cell" of a notebook, or in one of FORMATS.

    how: arguments of formats; each takes those that it needs.
    """
    outputs: dict[str, Callable[..., Any]]
    outputs = {"text": as_text, "rich": renderable, "cell": as_cell}
    return (outputs.get(form) or FORMATS[form])(result, **how)


def file_of(result: Any, form: str, **how: Any) -> bytes:
    """A result as a file of one of FORMATS, with the mark by which it may be replaced."""
    text = f"{shown(result, form, ascii=False, **how)}{FORMATS[form].mark}"
    return text.encode("utf-8", "backslashreplace")


def as_markdown(result: Any, files: Collection[str] = ()) -> str:
    """A result as a GitHub-flavoured page.  files: the names of the figures that it may show."""
    return as_page(view_of(result, "page"), files)


def as_webpage(result: Any, pictures: Mapping[str, bytes] | None = None) -> str:
    """A result as one file of HTML that needs no network; a report can be explored there.

    pictures: PNGs by the names of the images that show them.
    """
    from rooftrace.reporting.html import report_page, result_page
    from rooftrace.reporting.sections import Results

    if isinstance(result, Results):
        return report_page(result)
    return result_page(view_of(result, "page"), pictures)


def as_latex(result: Any, files: Collection[str] = (), style: str = "screen") -> str:
    """A result as a LaTeX document.  files: names of the figures that it may show.

    style: the width of its tables ("screen", "paper", "paper-column"); RequestError for another.
    """
    from rooftrace.reporting.renderers import as_latex as renderers_as_latex

    return renderers_as_latex(view_of(result, "page"), files, style)


def latex_tables(result: Any, style: str = "screen") -> dict[str, str]:
    """Each table of a result as a file that a paper takes in, by the name of the file."""
    from rooftrace.reporting.renderers import table_files

    return table_files(view_of(result, "page"), style)


def as_json(
    result: Any, document: Callable[[], Mapping[str, Any]] | None = None, *, ascii: bool = True
) -> str:
    """A result as JSON.  document: makes its contents; default its `to_dict`.

    ascii: escape other letters, as stdout may have any encoding.
    """
    made = (document or result.to_dict)()
    made_by = {} if "schema" in made else MADE_BY
    return to_json({**made_by, **made}, indent=1, ascii=ascii).decode() + "\n"


def as_csv(result: Any) -> str:
    """A result as CSV: what its `to_csv` gives, else its rows, else its frame."""
    if hasattr(result, "to_csv"):
        return str(result.to_csv())
    if hasattr(result, "to_rows"):
        return to_csv(result.to_rows())
    return str(result.frame().to_csv(index=False))


VIEWS: Mapping[str, str] = {
    "Results": "sections.builders:report_view",
    "Estimate": "views.results:estimate_view",
    "Breakdown": "views.moduletrees:breakdown_view",
    "Summary": "views.moduletrees:summary_view",
    "OpGraph": "views.moduletrees:graph_view",
    "Census": "views.moduletrees:census_view",
    "NodeTable": "views.moduletrees:nodes_view",
    "Explanation": "views.explanations:explanation_view",
    "Sweep": "views.sweeps:sweep_view",
    "Form": "views.sweeps:form_view",
    "SweepFleet": "views.sweeps:fleet_view",
    "Rooflines": "views.explanations:rooflines_view",
    "Reports": "views.explanations:reports_view",
    "Elasticities": "views.sensitivities:elasticities_view",
    "GridEffects": "views.sensitivities:grid_view",
    "Exploration": "views.answers:exploration_view",
    "ServingAnswer": "views.answers:serving_view",
    "RatesAnswer": "views.answers:rates_view",
    "PassingAnswer": "views.answers:passing_view",
    "CapacityAnswer": "views.answers:capacity_view",
    "MeshAnswer": "views.sensitivities:mesh_view",
    "ScalingAnswer": "views.sensitivities:scaling_view",
    "TrainingRun": "views.sensitivities:training_view",
    "GraphBreaks": "views.scripts:graph_breaks_view",
    "ScriptCost": "views.scripts:script_view",
    "Chip": "views.inventories:chip_view",
    "System": "views.inventories:system_view",
    "Diff": "views.differences:diff_view",
    "GateOutcome": "gates.reports:gate_view",
    "ModelInfo": "views.inventories:inventory_view",
    "ParameterDiff": "views.inventories:parameters_view",
    "CheckpointDiff": "views.differences:checkpoints_view",
    "Calibration": "views.validations:calibration_view",
    "Validation": "views.validations:validation_view",
    "RunDiff": "views.rundiffs:rundiff_view",
    "LiveResult": "views.scripts:loop_view",
}
"""The function that makes the view of a result, as "module:function", by the class of the result.

It takes the result and the output ("screen" or "page").  Its file is loaded when it is needed: a
report of predictions loads no code about measured time.
"""


def view_of(result: Any, output: view.Output) -> view.View:
    """The view of a result on an output; a view is returned as it is.

    Raises TypeError for a class that VIEWS does not name.
    """
    if isinstance(result, view.View):
        return result
    for kind in type(result).__mro__:
        if kind.__module__.startswith("rooftrace.") and kind.__name__ in VIEWS:
            module, _, name = VIEWS[kind.__name__].partition(":")
            function = getattr(import_module(f"rooftrace.reporting.{module}"), name)
            made: view.View = function(result, output)
            return made
    raise TypeError(f"{type(result).__name__}: VIEWS names no view of this class")


def estimate_view(result: Estimate, output: view.Output) -> view.View:
    """A report of one step."""
    from rooftrace.reporting.sections import Results, report_view

    estimates = {result.phase: {result.execution.name: {result.chip.name: result}}}
    return report_view(Results(estimates, {}, {result.phase: result.plan.source}), output)
