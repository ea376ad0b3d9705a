"""Reports on several targets: a folder for each, and all of them on one roofline and in one table.

A target that fails leaves the others as they are, and is named with its error.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooftrace._formats import FIGURES, TEXTS, USUAL
from rooftrace._progress import tell
from rooftrace.errors import RequestError, is_ours
from rooftrace.reporting.reports import report
from rooftrace.reporting.requests.calls import conditions_of
from rooftrace.reporting.requests.pricing import PricingOptions
from rooftrace.reporting.rooflinesteps import FIGURE, PAGE, Reports, names_of

if TYPE_CHECKING:
    from rooftrace.reporting.pages import Report

MANIFEST = "_comparison.json"
MOST = 200
"""Targets of one call at most."""


def write_comparison(
    result: Reports, out: Path, formats: Sequence[str], style: str = "screen"
) -> list[Path]:
    """Write the page, the table and the figure of all reports into a folder; their paths."""
    from rooftrace.reporting.pages import files as written
    from rooftrace.reporting.text import file_of

    with written.new_folder(out, MANIFEST) as folder:
        names: list[str] = []
        drawn = [name for name in FIGURES if name in formats]
        if result.roofline is not None and drawn:
            from rooftrace.reporting.figures import folder as figures

            for ending in drawn:
                names.append(f"{FIGURE}.{ending}")
                figures.draw_roofline(result.roofline, folder / names[-1], style)
        pictures = {name: (folder / name).read_bytes() for name in names if name.endswith(".png")}
        how = {"files": tuple(names), "pictures": pictures, "style": style}
        for name in (name for name in TEXTS if name in formats):
            names.append(f"{PAGE}.{name}")
            (folder / names[-1]).write_bytes(file_of(result, name, **how))
    return [out / name for name in names]


def reports(
    targets: Sequence[str],
    *,
    out: str | Path | None = None,
    formats: Sequence[str] | None = None,
    style: str = "screen",
    **asked: Any,
) -> Reports:
    """A report on each of several targets; with `out`, a folder for each inside of that one.

    asked: what `report` takes; it holds for all.  Beside the folders stand comparison.html, .md,
    .json and .csv (by `formats`) and a figure with all steps on one roofline.  A folder is written
    as soon as its report is there.

    Returns the Reports, with the failures by target.  Raises RequestError for no target, one that
    is there twice, and too many.
    """
    from rooftrace.reporting.pages import files as written

    _check(targets)
    conditions_of(report, PricingOptions.parted(asked)[0])
    used = USUAL if formats is None else tuple(formats)
    written.check_formats(used)
    folders = names_of(targets)
    for name in folders.values() if out is not None else ():
        written.check_folder(Path(out or "") / name, used)
    made: dict[str, Report] = {}
    failures: dict[str, str] = {}
    for number, target in enumerate(targets, 1):
        tell(f"{target}, {number} of {len(targets)}")
        try:
            result = report(target, **asked)
            if out is not None:
                result.write(Path(out) / folders[target], used, style=style)
        except (ValueError, LookupError, RuntimeError, OSError) as error:
            if not (isinstance(error, OSError) or is_ours(error)):
                raise
            failures[target] = _line(error)
            continue
        made[target] = result
    together = Reports(made, failures)
    if out is not None:
        write_comparison(together, Path(out), used, style)
    return together


def _line(error: BaseException) -> str:
    """An error in one line."""
    text = str(error.args[0]) if isinstance(error, LookupError) and error.args else str(error)
    return " ".join(text.split())


def _check(targets: Sequence[str]) -> None:
    if not targets:
        raise RequestError("targets: expected at least one, got none")
    if len(targets) > MOST:
        raise RequestError(f"{len(targets):,} targets: expected {MOST} at most in one call")
    for target in targets:
        if list(targets).count(target) > 1:
            raise RequestError(f"{target}: it is there {list(targets).count(target)} times")
