"""The files of a report or a validation: makes them aside, then puts them into their folder."""

from __future__ import annotations

import contextlib
import csv
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rooftrace._escapes import to_cells, to_json
from rooftrace._outputs import MARKS
from rooftrace._reading import check_name
from rooftrace._writing import aside, check_files, put_files
from rooftrace.errors import RequestError

if TYPE_CHECKING:
    from rooftrace.measured.validate import Validation
    from rooftrace.reporting.sections import Results


FORMATS = ("html", "md", "json", "csv", "png")
"""What a report has unless it is asked for other formats."""
FIGURES = ("png", "svg", "pdf")
MANIFEST = "_report.json"
_NAMES = {"html": "report.html", "md": "report.md", "json": "report.json", "csv": "ops.csv"}
_NAMES |= {"tex": "report.tex", "png": "roofline.png", "svg": "roofline.svg", "pdf": "roofline.pdf"}
"""The file of a format that every report has."""
ALL_FORMATS = (*FORMATS, *FIGURES[1:], "trace", "tex", "chakra", "chakra-all")


def check_formats(formats: Sequence[str], among: Sequence[str] = ALL_FORMATS) -> None:
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


def check_folder(out: Path, formats: Sequence[str] = FORMATS) -> None:
    """Raise now, before any work, what would stop these formats from being written later.

    Raises ReportFolderError for a folder, OutputError for a file in it that would be lost,
    FigureError where matplotlib does not load.
    """
    with new_folder(out, MANIFEST):
        check_files(out, [_NAMES[name] for name in formats if name in _NAMES], MANIFEST)
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
        if "csv" in formats:
            with (folder / "ops.csv").open("w", encoding="utf-8", newline="") as file:
                write_records(chain.from_iterable(results.records()), file)
            names.append("ops.csv")
        if "json" in formats:
            from rooftrace.reporting.sections import document

            (folder / "report.json").write_bytes(to_json(document(results), indent=1) + b"\n")
            names.append("report.json")
        if "trace" in formats:
            from rooftrace.reporting.figures import timeline

            names += timeline.write_timelines(results, folder)
        if "chakra" in formats or "chakra-all" in formats:
            from rooftrace.reporting.chakra import write_traces

            names += write_traces(results, folder, every_rank="chakra-all" in formats)
        if "html" in formats:
            from rooftrace.reporting.hypertext import report_page

            (folder / "report.html").write_text(report_page(results), encoding="utf-8")
            names.append("report.html")
        if "md" in formats:
            from rooftrace.reporting.text import as_markdown

            page = f"{as_markdown(results, figures)}{MARKS['md']}"
            (folder / "report.md").write_text(page, encoding="utf-8")
            names.append("report.md")
        if "tex" in formats:
            names += _write_latex(results, folder, figures, style)
    if failure is not None:
        there = f"; {', '.join(names)} in {str(out)!r} are written" if names else ""
        raise FigureError(f"figures cannot be drawn ({_short(failure)}){there}") from failure
    return [out / name for name in sorted(names, key=_place)]


def _write_latex(
    results: Results, folder: Path, figures: Sequence[str], style: str
) -> Iterator[str]:
    """report.tex, and a file for each table of it; their names."""
    from rooftrace.reporting.text import shown

    texts = {"report.tex": shown(results, "latex", files=figures, style=style)}
    for name, text in (texts | shown(results, "latex tables", style=style)).items():
        (folder / name).write_text(text, encoding="ascii")
        yield name


def _place(name: str) -> int:
    """Where a file stands among those that are told: what is read first, pictures last."""
    order = ("report.html", "report.md", "report.tex", "report.json", "ops.csv")
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
    from rooftrace.reporting.text import as_markdown, shown

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
            rows = [check.to_dict() for check in result.nodes]
            with (folder / "nodes.csv").open("w", encoding="utf-8", newline="") as file:
                table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
                table.writeheader()
                table.writerows(map(to_cells, rows))  # None is an empty cell
            names.append("nodes.csv")
        if result.estimate is not None and result.alignment is not None:
            from rooftrace.reporting.figures import timeline

            names.append("timeline.json.gz")
            timeline.write_timeline(folder / names[-1], result.estimate, result.alignment)
        text = to_json(result.to_dict(), indent=1)
        (folder / "validation.json").write_bytes(text + b"\n")
        page = f"{as_markdown(result, names)}{MARKS['md']}"
        (folder / "validation.md").write_text(page, encoding="utf-8")
        (folder / "validation.html").write_text(shown(result, "webpage"), encoding="utf-8")
    made = ("validation.html", "validation.md", "validation.json", *names)
    return [out / name for name in made]


def write_records(records: Iterable[Mapping[str, Any]], file: IO[str]) -> None:
    """Write records of equal keys as one CSV; text that would be a formula is quoted."""
    writer = None
    for record in records:
        if writer is None:
            writer = csv.DictWriter(file, list(record), lineterminator="\n")
            writer.writeheader()
        writer.writerow(to_cells(record))


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
