"""Files that are whole or not there: makes them aside, then moves them into place."""

from __future__ import annotations

import csv
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rooftrace.measured.validate import Validation
    from rooftrace.reporting.sections import Results


class ReportFolderError(OSError):
    """The folder for a report cannot be written."""


def check_folder(out: Path) -> None:
    """Raise ReportFolderError now, before any work, where `out` could not be written later."""
    with _aside(out):
        pass


def write_report(results: Results, out: Path, formats: Sequence[str]) -> list[Path]:
    """Make the files of `formats` and move them into `out`; their final paths, in order."""
    with _aside(out) as folder:
        names: list[str] = []
        if "png" in formats:
            from rooftrace.reporting.figures import write_figures

            names += write_figures(results, folder)
        figures = tuple(names)
        if "csv" in formats:
            with (folder / "ops.csv").open("w", encoding="utf-8", newline="") as file:
                for number, frame in enumerate(results.frames()):
                    frame.to_csv(file, index=False, header=number == 0, lineterminator="\n")
            names.append("ops.csv")
        if "json" in formats:
            from rooftrace.reporting.sections import document

            text = json.dumps(document(results), indent=1, allow_nan=False, ensure_ascii=False)
            (folder / "report.json").write_text(text + "\n", encoding="utf-8")
            names.append("report.json")
        if "trace" in formats:
            from rooftrace.reporting.figures import write_timelines

            names += write_timelines(results, folder)
        if "md" in formats:
            from rooftrace.reporting.text import as_markdown

            (folder / "report.md").write_text(as_markdown(results, figures), encoding="utf-8")
            names.append("report.md")
        return _move(folder, out, names)


def write_validation(result: Validation, out: Path) -> list[Path]:
    """Make the files of a validation and move them into `out`; their final paths, in order."""
    from rooftrace.reporting.figures import parity, style
    from rooftrace.reporting.text import as_markdown, parity_points

    with _aside(out) as folder:
        names = []
        points, left_out = parity_points(result)
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
                table.writerows(rows)  # None is an empty cell
            names.append("nodes.csv")
        if result.estimate is not None and result.alignment is not None:
            from rooftrace.reporting.figures import write_timeline

            names.append("timeline.json.gz")
            write_timeline(folder / names[-1], result.estimate, result.alignment)
        text = json.dumps(result.to_dict(), indent=1, allow_nan=False, ensure_ascii=False)
        (folder / "validation.json").write_text(text + "\n", encoding="utf-8")
        page = as_markdown(result, names)
        (folder / "validation.md").write_text(page, encoding="utf-8")
        return _move(folder, out, ["validation.md", "validation.json", *names])


def _move(folder: Path, out: Path, names: Sequence[str]) -> list[Path]:
    """Move the files into place: as one folder where `out` is new, else each of them whole."""
    try:
        if out.exists():
            for name in names:
                os.replace(folder / name, out / name)
        else:
            os.replace(folder, out)
    except OSError as error:
        raise _refused(out, error) from error
    return [out / name for name in names]


@contextmanager
def _aside(out: Path) -> Iterator[Path]:
    """A temporary folder on the file system of `out`, gone afterwards; parents that had to be made
    for it are removed again if nothing was put into `out`."""
    missing = [parent for parent in out.absolute().parents if not parent.exists()]
    if out.exists() and not (out.is_dir() and os.access(out, os.W_OK | os.X_OK)):
        reason = "Permission denied" if out.is_dir() else "it is a file"
        raise ReportFolderError(f"report folder {str(out)!r}: cannot write there: {reason}")
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        # Inside `out` where it exists: only that one is known to be writable.
        folder = Path(
            tempfile.mkdtemp(
                prefix=".rooftrace-", dir=out if out.is_dir() else out.absolute().parent
            )
        )
    except OSError as error:
        _remove_empty(missing)
        raise _refused(out, error) from error
    try:
        # mkdtemp makes a private folder; the one inside has the permissions of any other.
        made = folder / "report"
        made.mkdir()
        yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _remove_empty(missing)


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove those of these folders that are empty, innermost first."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return


def _refused(out: Path, error: OSError) -> ReportFolderError:
    return ReportFolderError(
        f"report folder {str(out)!r}: cannot write there: {error.strerror or error}"
    )
