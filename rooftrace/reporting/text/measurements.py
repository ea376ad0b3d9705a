"""The views of results about measured time."""

from __future__ import annotations

from rooftrace.measured.fit import Calibration
from rooftrace.measured.rundiffs import RunDiff
from rooftrace.measured.validate import Validation
from rooftrace.reporting.text.calibrations import calibration_view
from rooftrace.reporting.text.dispatch import view_of
from rooftrace.reporting.text.rundiffs import rundiff_view
from rooftrace.reporting.text.validations import validation_view


def register() -> None:
    """Let `view_of` know them."""
    view_of.register(Calibration, lambda result, output: calibration_view(result))
    view_of.register(Validation, lambda result, output: validation_view(result))
    view_of.register(RunDiff, lambda result, output: rundiff_view(result))
