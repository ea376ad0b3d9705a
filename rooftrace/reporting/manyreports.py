"""Reports on several targets: a folder for each, and all of them on one roofline and in one table.

A target that fails leaves the others as they are, and is named with its error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooftrace._escapes import file_part, to_json
from rooftrace._progress import tell
from rooftrace._shown import Shown, short, some
from rooftrace._writing import write_bytes
from rooftrace.errors import RequestError, is_ours
from rooftrace.reporting.reports import report
from rooftrace.reporting.rooflinesteps import SIZES, RooflineRow, Rooflines

if TYPE_CHECKING:
    from rooftrace.reporting.pages import Report

MOST = 200
"""Targets of one call at most."""
FIGURE = "roofline"
PAGE = "comparison"


@dataclass(frozen=True, repr=False)
class Reports(Shown):
    """Reports by target, in the order they were asked for; failures: why others have none.

    `roofline` has their steps, of the main execution of each report, on one roofline; print()
    shows that table, and the failures below it.
    """

    reports: Mapping[str, Report]
    failures: Mapping[str, str]

    def __repr__(self) -> str:
        failed = f"; {len(self.failures)} failed" if self.failures else ""
        return short(self, f"{some(self.reports)}{failed}")

    @property
    def roofline(self) -> Rooflines | None:
        """The steps of all reports beside each other; None where none is there."""
        rows = tuple(self._rows())
        return Rooflines(rows) if rows else None

    def _rows(self) -> Iterator[RooflineRow]:
        names = names_of(list(self.reports))
        for target, made in self.reports.items():
            for phase in made.phases:
                for estimate in made.estimates[phase][made.main].values():
                    told = estimate.graph.workload
                    sizes = {name: int(told[name]) for name in SIZES if told.get(name)}
                    if phase != "decode":
                        sizes.pop("kv", None)
                    yield RooflineRow(names[target], sizes, estimate)

    def to_rows(self) -> list[dict[str, Any]]:
        """A row for each step, as a CSV file takes them."""
        return self.roofline.to_rows() if self.roofline is not None else []

    def to_dict(self) -> dict[str, Any]:
        """The steps beside each other, and the failures; each report has its own numbers."""
        return {"steps": self.to_rows(), "failures": dict(self.failures)}

    def write_comparison(
        self, out: Path, formats: Sequence[str], style: str = "screen"
    ) -> list[Path]:
        """Write the page, the table and the figure of all reports into a folder; their paths."""
        from rooftrace.reporting import pages
        from rooftrace.reporting.text import as_markdown, shown

        paths: list[Path] = []
        drawn = [name for name in pages.files.FIGURES if name in formats]
        if self.roofline is not None and drawn:
            from rooftrace.reporting.figures import folder

            out.mkdir(parents=True, exist_ok=True)
            for ending in drawn:
                paths.append(out / f"{FIGURE}.{ending}")
                folder.draw_roofline(self.roofline, paths[-1], style)
        files = [path.name for path in paths]
        texts: dict[str, Callable[[], str]] = {
            "html": lambda: str(shown(self, "webpage")),
            "md": lambda: as_markdown(self, files),
            "tex": lambda: str(shown(self, "latex", files=files, style=style)),
            "json": lambda: to_json(self.to_dict(), indent=1).decode() + "\n",
            "csv": self._csv,
        }
        for name, text in texts.items():
            if name in formats:
                paths.append(out / f"{PAGE}.{name}")
                write_bytes(paths[-1], text().encode("utf-8", "backslashreplace"))
        return paths

    def _csv(self) -> str:
        import io

        from rooftrace.reporting import pages

        file = io.StringIO()
        pages.files.write_records(self.to_rows(), file)
        return file.getvalue()


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
    from rooftrace.reporting import pages

    _check(targets)
    used = pages.files.FORMATS if formats is None else tuple(formats)
    pages.check_formats(used)
    folders = names_of(targets)
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
        together.write_comparison(Path(out), used, style)
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


def names_of(targets: Sequence[str]) -> dict[str, str]:
    """A short name for each target, of which each is the name of a folder too.

    The last part of its path where that tells it from the others, else all of it, else a number.
    """
    last = {target: _short(target) for target in targets}
    whole = {target: file_part(target).strip("_.") or "target" for target in targets}
    made: dict[str, str] = {}
    taken = {PAGE, FIGURE}
    for target in targets:
        name = last[target] if list(last.values()).count(last[target]) == 1 else whole[target]
        number = 1
        while name in taken:
            number += 1
            name = f"{last[target]}-{number}"
        taken.add(name)
        made[target] = name
    return made


def _short(target: str) -> str:
    part = target.rstrip("/").rpartition("/")[2]
    return file_part(part.removesuffix(".json")).strip("_.") or "target"
