"""How each kind of result is shown and written: one function for each, chosen by its type.

A result of a layer below says `print` of itself by `rooftrace._render`, which ends here.
"""

from __future__ import annotations

from functools import singledispatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.estimating import Estimate
from rooftrace.measured.fit import Calibration
from rooftrace.measured.validate import Validation
from rooftrace.reporting.pages.files import write_validation
from rooftrace.reporting.pages.table import as_text, render_estimates
from rooftrace.reporting.text import render_calibration, render_validation

if TYPE_CHECKING:
    from rich.console import RenderableType


@singledispatch
def printed(result: Any) -> str:
    """What print(result) shows, as plain text."""
    return as_text(renderable(result))


@printed.register(Estimate)
def _(result: Estimate) -> str:
    return render_estimates([result])


@singledispatch
def renderable(result: Any) -> RenderableType:
    """What rich shows of a result.  Raises TypeError for a type without a view."""
    raise TypeError(f"{type(result).__name__}: no view is registered for it")


@renderable.register(Calibration)
def _(result: Calibration) -> RenderableType:
    return render_calibration(result)


@renderable.register(Validation)
def _(result: Validation) -> RenderableType:
    return render_validation(result)


@singledispatch
def write(result: Any, out: Path) -> list[Path]:
    """Write the files of a result into the folder `out`; their paths."""
    raise TypeError(f"{type(result).__name__}: no files are registered for it")


@write.register(Validation)
def _(result: Validation, out: Path) -> list[Path]:
    return write_validation(result, out)
