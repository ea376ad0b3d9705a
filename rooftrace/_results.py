"""What methods of results need of layers above their own; each import waits for the call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rooftrace.costmodels.estimates import Estimate
    from rooftrace.studies.advice import Headroom


def render(result: Any, form: str, **how: Any) -> Any:
    """A result for print ("text"), rich ("rich") or a notebook ("cell"); made by reporting."""
    from rooftrace.reporting.views import shown

    return shown(result, form, **how)


def headroom(estimate: Estimate) -> Headroom:
    """The result of `estimate.headroom()`: advice imports estimates, not the other way round."""
    from rooftrace.studies.advice import headroom

    return headroom(estimate)


def write(result: Any, out: Path, figures: Sequence[str]) -> list[Path]:
    """Write the files of a validation into a folder; only reporting knows how."""
    from rooftrace.reporting.commands.reportfolder import write_validation

    return write_validation(result, out, figures)
