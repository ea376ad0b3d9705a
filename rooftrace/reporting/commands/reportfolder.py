"""Reports of every phase, execution and chip, and the folders of files that hold them."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooftrace._escapes import file_part, to_csv
from rooftrace._formats import FIGURES, FORMATS, OF_REPORTS, TEXTS, USUAL, names as formats_of
from rooftrace._reading import check_name
from rooftrace._writing import aside, check_files, put_files
from rooftrace.costmodels.estimates import Estimate, estimate
from rooftrace.costmodels.fusion import ExecutionModel, Plan, execution_model, usual_execution
from rooftrace.errors import RequestError, one_of
from rooftrace.graph import OpGraph
from rooftrace.hardware import Chip
from rooftrace.reporting.sections import Results

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

    from rooftrace.measured.fit import Validation
    from rooftrace.reporting.figures.printing import Medium


# -- folders ---------------------------------------------------------------------------------------

MANIFEST = "_report.json"


def check_formats(formats: Sequence[str], among: Sequence[str] = OF_REPORTS) -> None:
    """Raise RequestError for a format that is not among these, and for none."""
    if not formats:
        raise RequestError(f"format: {one_of('', among, 'some')}, got none")
    for name in formats:
        if name not in among:
            raise RequestError(f"format {name!r}: {one_of(name, among, 'some')}")


class ReportFolderError(OSError):
    """The folder for a report cannot be written."""


class FigureError(RuntimeError):
    """Figures cannot be drawn: the reason, and the files that are there nevertheless."""


def check_folder(out: Path, formats: Sequence[str] = USUAL) -> None:
    """Raise, before any work, the errors of writing these formats later.

    Raises ReportFolderError for a folder, RequestError for a file in it that would be lost,
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

    style: of figures (`figures.printing.MEDIA`).

    Raises FigureError, after all other files are there, where a figure cannot be drawn.
    """
    from rooftrace.reporting.views import file_of, latex_tables

    failure: Exception | None = None
    with new_folder(out, MANIFEST) as folder:
        names: list[str] = []
        endings = [name for name in FIGURES if name in formats]
        if endings:
            try:
                names += write_figures(results, folder, endings, style)
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


def figures(report: Results, medium: Medium) -> Iterator[tuple[str, Callable[[], Figure]]]:
    """(name of the file without its ending, function that draws it) in the order of the report."""
    from rooftrace.reporting.figures import breakdown, memoryplot, roofline

    yield "roofline", lambda: roofline.roofline(report, medium)
    for phase in report.phases:
        draw = partial(roofline.family_roofline, report, phase, medium)
        yield f"roofline-{file_part(phase)}", draw
    yield "time", lambda: breakdown.time_figure(report, medium)
    yield "bytes", lambda: breakdown.byte_figure(report, medium)
    if report.memory:
        yield "memory", lambda: breakdown.peak_figure(report, medium)
    for phase, need in report.memory.items():
        if need.timeline.moments:
            draw = partial(memoryplot.memory_figure, report, phase, medium)
            yield f"memory-{file_part(phase)}", draw


def write_figures(report: Results, folder: Path, endings: Sequence[str], style: str) -> list[str]:
    """Draw every figure into `folder`, in each of these formats; the names of the files.

    style: one of `printing.MEDIA`.
    """
    from rooftrace.reporting.figures import printing

    medium = printing.medium_of(style)
    names: list[str] = []
    for name, draw in figures(report, medium):
        files = [f"{name}.{ending}" for ending in endings]
        printing.save(draw, *(folder / file for file in files), medium=medium)
        names += files
    return names


def _place(name: str) -> int:
    """The place of a file in the list of written files: pages first, pictures last."""
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
    from rooftrace.reporting.views import file_of

    with new_folder(out, "_validation.json") as folder:
        names = []
        points, left_out = parity.parity_points(result)
        if points:
            title = "Predicted and measured"
            facts = (result.chip.title, result.execution, result.knobs, left_out)
            subtitle = ", ".join(filter(None, facts))
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
    """A folder to make files in, which are then moved into `out` with their manifest.

    Folders that were made for it are removed again if nothing was put there.
    Raises ReportFolderError, and RequestError where a file would be lost.
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
    """Remove the empty ones of these folders, innermost first."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return


# -- report ----------------------------------------------------------------------------------------

DETECTED = "detected"
"""The name of the execution without measured factors on bytes, before the calibrated one."""


@dataclass(frozen=True, repr=False)
class Report(Results):
    """Results that print one screen; `to_dict()` is report.json; `write()` makes a folder."""

    def to_dict(self) -> dict[str, Any]:
        """The contents of report.json (report.schema.json); equal inputs give equal contents."""
        from rooftrace.reporting.sections import document

        return document(self)

    def to_frame(self) -> pandas.DataFrame:
        """Rows of kernels of each phase and execution on the first chip, as `Estimate.to_frame`."""
        import pandas

        return pandas.concat(list(self.frames()), ignore_index=True)

    def to_csv(self) -> str:
        """The contents of ops.csv: the rows of `to_frame`.

        Text that a spreadsheet would run as a formula begins with a "'".
        """
        return to_csv(chain.from_iterable(self.records()))

    def write(
        self, out: str | Path, formats: Sequence[str] = USUAL, *, style: str = "screen"
    ) -> list[Path]:
        """Write report.html, report.md, report.json, ops.csv and figures into `out`; their paths.

        Figures are "png", "svg" or "pdf".  style: "screen"; "paper" is the width of a page of two
        columns (7.2 in), "paper-column" that of a column (3.5 in), with type of 7 to 9 points.
        The format "trace" adds timeline_<phase>.json.gz, for Perfetto; "chakra" adds
        chakra_<phase>.<rank>.et of the traced process for simulators of networks, "chakra-all" one
        for every process of the mesh.

        All files are made next to `out` first and then moved in, so nothing is left half-written.
        Raises ReportFolderError where the folder cannot be written, RequestError for a format that
        reports do not have, and FigureError, after all else is written, where a figure fails.
        """
        from rooftrace.reporting.figures import style as looks

        check_formats(formats)
        looks.medium_of(style)
        return write_report(self, Path(out), formats, style)


def conditions(
    chips: Sequence[str | Chip] | None, executions: Sequence[str | ExecutionModel]
) -> tuple[list[Chip], list[ExecutionModel]]:
    """The chips and execution models of a report.

    Raises the errors of loading, and RequestError for none, or one that is there twice.
    """
    models = [execution_model(execution) for execution in executions]
    targets = [ExecutionModel.chip_of(c, models) for c in ([None] if chips is None else chips)]
    _check_unique("chip", [chip.name for chip in targets])
    _check_unique("execution", [model.name for model in models])
    return targets, models


def _check_unique(name: str, values: Sequence[str]) -> None:
    if not values:
        raise RequestError(f"{name}: expected at least one, got none")
    for value, count in Counter(values).items():
        if count > 1:
            raise RequestError(f"{name} {value!r}: it is there {count} times; give it once")


def build_report(
    graphs: Mapping[str, OpGraph],
    chips: Sequence[str | Chip] | None = None,
    executions: Sequence[str | ExecutionModel] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Price each graph under each execution model and put it on each chip.

    graphs: by phase name.  executions: default naive and the usual one.  progress: gets the phase
    that is being priced.  Before a model with measured factors on bytes comes the same model
    without them, as "detected".
    Raises the errors of `estimate`, and RequestError where any of the three is empty, or has a name
    twice.
    """
    if not graphs:
        raise RequestError("graphs: expected at least one, got none")
    usual = ("naive", usual_execution(graphs))
    targets, models = conditions(chips, usual if executions is None else executions)
    models = list(_with_detected(models))
    estimates: dict[str, dict[str, dict[str, Estimate]]] = {}
    for phase, graph in graphs.items():
        estimates[phase] = {}
        if progress:
            progress(", ".join([phase, *(model.name for model in models)]))
        for model, planned in zip(models, Plan.each(graph, models), strict=True):
            estimates[phase][model.name] = {chip.name: estimate(planned, chip) for chip in targets}
    made = Report(estimates, {}, dict(graphs))
    return replace(made, memory={phase: made.estimate(phase).memory for phase in graphs})


def _with_detected(models: Sequence[ExecutionModel]) -> Iterator[ExecutionModel]:
    """The models, and before the first that has measured factors the same one without them."""
    named = any(model.name == DETECTED for model in models)
    calibrated = next((model for model in models if model.traffic is not None), None)
    for model in models:
        if model is calibrated and not named:
            yield replace(model.by_rules, name=DETECTED)
        yield model
