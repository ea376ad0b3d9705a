"""Files that are whole or not there: makes them aside, then moves them into place."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rooftrace._escapes import to_cells, to_json
from rooftrace._writing import aside, put_folder
from rooftrace.errors import RequestError

if TYPE_CHECKING:
    from rooftrace.measured.validate import Validation
    from rooftrace.reporting.sections import Results


FORMATS = ("md", "json", "csv", "png")
"""What a report has unless it is asked for other formats."""
ALL_FORMATS = (*FORMATS, "trace")


def check_formats(formats: Sequence[str]) -> None:
    """Raise RequestError for a format that a report does not have, or for none."""
    shown = ", ".join(ALL_FORMATS)
    if not formats:
        raise RequestError(f"format: expected some of {shown}, got none")
    for name in formats:
        if name not in ALL_FORMATS:
            raise RequestError(f"format {name!r}: expected some of {shown}")


class ReportFolderError(OSError):
    """The folder for a report cannot be written."""


class FigureError(RuntimeError):
    """Figures cannot be drawn: says why, and which files are there nevertheless."""


def check_folder(out: Path, formats: Sequence[str] = FORMATS) -> None:
    """Raise now, before any work, what would stop these formats from being written later.

    Raises ReportFolderError for a folder, FigureError where matplotlib does not load.
    """
    with _new_folder(out):
        pass
    if "png" in formats:
        try:
            import matplotlib  # noqa: F401  reads its settings and MPLBACKEND
        except Exception as error:
            raise FigureError(
                f"figures: matplotlib does not load ({_short(error)}); mend that, for example "
                "unset MPLBACKEND, or leave out png: --format md,json,csv"
            ) from error


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def write_report(results: Results, out: Path, formats: Sequence[str]) -> list[Path]:
    """Make the files of `formats` and move them into `out`; their final paths, in order.

    Raises FigureError, after all other files are there, where a figure cannot be drawn.
    """
    failure: Exception | None = None
    with _new_folder(out) as folder:
        names: list[str] = []
        if "png" in formats:
            try:
                from rooftrace.reporting.figures import write_figures

                names += write_figures(results, folder)
            except Exception as error:  # numbers are not lost with their pictures
                failure = error
                for drawn in folder.glob("*.png"):
                    drawn.unlink()
        figures = tuple(names)
        if "csv" in formats:
            with (folder / "ops.csv").open("w", encoding="utf-8", newline="") as file:
                write_records(chain.from_iterable(results.records()), file)
            names.append("ops.csv")
        if "json" in formats:
            from rooftrace.reporting.sections import document

            (folder / "report.json").write_bytes(to_json(document(results), indent=1) + b"\n")
            names.append("report.json")
        if "trace" in formats:
            from rooftrace.reporting.figures.timeline import write_timelines

            names += write_timelines(results, folder)
        if "md" in formats:
            from rooftrace.reporting.text import as_markdown

            (folder / "report.md").write_text(as_markdown(results, figures), encoding="utf-8")
            names.append("report.md")
    if failure is not None:
        there = f"; {', '.join(names)} in {str(out)!r} are written" if names else ""
        raise FigureError(f"figures cannot be drawn ({_short(failure)}){there}") from failure
    return [out / name for name in names]


def write_validation(result: Validation, out: Path) -> list[Path]:
    """Make the files of a validation and move them into `out`; their final paths, in order."""
    from rooftrace.reporting.figures import parity, style
    from rooftrace.reporting.text import as_markdown

    with _new_folder(out) as folder:
        names = []
        points, left_out = parity.parity_points(result)
        if points:
            title = "Predicted and measured"
            about = (result.chip.title, result.execution, result.knobs, left_out)
            subtitle = ", ".join(filter(None, about))
            style.save(parity.parity_figure(points, title, subtitle), folder / "parity.png")
            names.append("parity.png")
        if result.nodes:
            rows = [check.to_dict() for check in result.nodes]
            with (folder / "nodes.csv").open("w", encoding="utf-8", newline="") as file:
                table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
                table.writeheader()
                table.writerows(map(to_cells, rows))  # None is an empty cell
            names.append("nodes.csv")
        if result.estimate is not None and result.alignment is not None:
            from rooftrace.reporting.figures.timeline import write_timeline

            names.append("timeline.json.gz")
            write_timeline(folder / names[-1], result.estimate, result.alignment)
        text = to_json(result.to_dict(), indent=1)
        (folder / "validation.json").write_bytes(text + b"\n")
        page = as_markdown(result, names)
        (folder / "validation.md").write_text(page, encoding="utf-8")
    return [out / name for name in ("validation.md", "validation.json", *names)]


def write_records(records: Iterable[Mapping[str, Any]], file: IO[str]) -> None:
    """Write records of equal keys as one CSV; text that would be a formula is quoted."""
    writer = None
    for record in records:
        if writer is None:
            writer = csv.DictWriter(file, list(record), lineterminator="\n")
            writer.writeheader()
        writer.writerow(to_cells(record))


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A folder to make files in, which then takes the place of `out` as a whole.

    Parents that had to be made for it are removed again if nothing was put into `out`.
    """
    missing = [parent for parent in out.absolute().parents if not parent.exists()]
    if out.exists() and not (out.is_dir() and os.access(out, os.W_OK | os.X_OK)):
        reason = "Permission denied" if out.is_dir() else "it is a file"
        raise ReportFolderError(f"report folder {str(out)!r}: cannot write there: {reason}")
    parent = out.absolute().parent
    if out.is_dir() and not os.access(parent, os.W_OK | os.X_OK):
        parent = out
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with aside(parent) as folder:
            # The hidden folder is private; the one inside has the permissions of any other.
            made = folder / "report"
            made.mkdir()
            yield made
            if any(made.iterdir()):
                put_folder(made, out)
    except OSError as error:
        if isinstance(error, ReportFolderError):
            raise
        raise ReportFolderError(
            f"report folder {str(out)!r}: cannot write there: {error.strerror or error}"
        ) from error
    finally:
        _remove_empty(missing)


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove those of these folders that are empty, innermost first."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return
