"""The files of a report or a validation: makes them aside, then puts them into their folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rooftrace._escapes import to_csv
from rooftrace._formats import (
    FIGURES,
    FORMATS,
    OF_REPORTS,
    TEXTS,
    USUAL,
    names as formats_of,
)
from rooftrace._reading import check_name
from rooftrace._writing import aside, check_files, put_files
from rooftrace.errors import RequestError

if TYPE_CHECKING:
    from rooftrace.measured.validate import Validation
    from rooftrace.reporting.sections import Results


MANIFEST = "_report.json"


def check_formats(formats: Sequence[str], among: Sequence[str] = OF_REPORTS) -> None:
    """Raise RequestError for a format that a report, or what else is written, does not have.

    Also for none.
    """
    shown = ", ".join(among)
    if not formats:
        raise RequestError(f"format: expected some of {shown}, got none")
    for name in formats:
        if name not in among:
            raise RequestError(f"format {name!r}: expected some of {shown}")


class ReportFolderError(OSError):
    """The folder for a report cannot be written."""


class FigureError(RuntimeError):
    """Figures cannot be drawn: says why, and which files are there nevertheless."""


def check_folder(out: Path, formats: Sequence[str] = USUAL) -> None:
    """Raise now, before any work, what would stop these formats from being written later.

    Raises ReportFolderError for a folder, OutputError for a file in it that would be lost,
    FigureError where matplotlib does not load.
    """
    with new_folder(out, MANIFEST):
        files = [made.file for name, made in FORMATS.items() if name in formats and made.file]
        check_files(out, files, MANIFEST)
    if any(name in formats for name in FIGURES):
        try:
            import matplotlib  # noqa: F401  reads its settings and MPLBACKEND
        except Exception as error:
            raise FigureError(
                f"figures: matplotlib does not load ({_short(error)}); mend that, for example "
                "unset MPLBACKEND, or leave out figures: --format html,md,json,csv"
            ) from error


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def write_report(
    results: Results, out: Path, formats: Sequence[str], style: str = "screen"
) -> list[Path]:
    """Make the files of `formats` and move them into `out`; their final paths, in order.

    style: what figures are made for (`figures.printing.MEDIA`).

    Raises FigureError, after all other files are there, where a figure cannot be drawn.
    """
    from rooftrace.reporting.text import file_of, latex_tables

    failure: Exception | None = None
    with new_folder(out, MANIFEST) as folder:
        names: list[str] = []
        endings = [name for name in FIGURES if name in formats]
        if endings:
            try:
                from rooftrace.reporting.figures import folder as figures_of

                names += figures_of.write_figures(results, folder, endings, style)
            except Exception as error:  # numbers are not lost with their pictures
                failure = error
                for drawn in folder.iterdir():
                    drawn.unlink()
        figures = tuple(names)
        for name in (name for name in formats_of("steps") if name in formats):
            names += FORMATS[name](results, folder)
        for name in (name for name in reversed(TEXTS) if name in formats):  # pages last
            names.append(FORMATS[name].file)
            (folder / names[-1]).write_bytes(file_of(results, name, files=figures, style=style))
        if "tex" in formats:
            for name, text in latex_tables(results, style).items():
                names.append(name)
                (folder / name).write_text(text, encoding="ascii")
    if failure is not None:
        there = f"; {', '.join(names)} in {str(out)!r} are written" if names else ""
        raise FigureError(f"figures cannot be drawn ({_short(failure)}){there}") from failure
    return [out / name for name in sorted(dict.fromkeys(names), key=_place)]


def _place(name: str) -> int:
    """Where a file stands among those that are told: what is read first, pictures last."""
    order = ("report.html", *(FORMATS[form].file for form in TEXTS))
    drawn = name.rpartition(".")[2] in FIGURES
    return order.index(name) if name in order else len(order) + drawn


def write_validation(
    result: Validation, out: Path, figures: Sequence[str] = ("png",)
) -> list[Path]:
    """Make the files of a validation and move them into `out`; their final paths, in order.

    figures: the formats of the figure, of FIGURES; RequestError for another one.
    """
    check_formats(figures, FIGURES)
    from rooftrace.reporting.figures import parity, style
    from rooftrace.reporting.text import file_of

    with new_folder(out, "_validation.json") as folder:
        names = []
        points, left_out = parity.parity_points(result)
        if points:
            title = "Predicted and measured"
            about = (result.chip.title, result.execution, result.knobs, left_out)
            subtitle = ", ".join(filter(None, about))
            names += [f"parity.{ending}" for ending in figures]
            files = [folder / name for name in names]
            style.save(lambda: parity.parity_figure(points, title, subtitle), *files)
        if result.nodes:
            names.append("nodes.csv")
            rows = to_csv(check.to_dict() for check in result.nodes)
            (folder / "nodes.csv").write_text(rows, encoding="utf-8")
        if result.estimate is not None and result.alignment is not None:
            from rooftrace.reporting.figures import timeline

            names.append("timeline.json.gz")
            timeline.write_timeline(folder / names[-1], result.estimate, result.alignment)
        pages = [f"validation.{form}" for form in ("html", "md", "json")]
        for form, name in zip(("html", "md", "json"), pages, strict=True):
            (folder / name).write_bytes(file_of(result, form, files=names))
    return [out / name for name in (*pages, *names)]


@contextlib.contextmanager
def new_folder(out: Path, manifest: str) -> Iterator[Path]:
    """A folder to make files in, which are then put into `out`, each whole, with their manifest.

    Folders that had to be made for it are removed again if nothing was put there.
    Raises ReportFolderError, and OutputError where a file would be lost.
    """
    missing: list[Path] = []
    try:
        check_name(out)
        folders = (out.absolute(), *out.absolute().parents)
        missing += [folder for folder in folders if not folder.exists()]
        if out.is_symlink() and not out.exists():
            raise ReportFolderError(_said(out, f"it is a link to {os.readlink(out)!r}, not there"))
        if out.exists() and not out.is_dir():
            raise ReportFolderError(_said(out, "it is a file"))
        out.mkdir(parents=True, exist_ok=True)
        with aside(out) as made:
            yield made
            if any(made.iterdir()):
                put_files(made, out, manifest)
    except OSError as error:
        if isinstance(error, ReportFolderError):
            raise
        raise ReportFolderError(_said(out, error.strerror or str(error))) from error
    finally:
        _remove_empty(missing)


def _said(out: Path, reason: str) -> str:
    return f"report folder {str(out)!r}: cannot write there: {reason}"


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove those of these folders that are empty, innermost first."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return
