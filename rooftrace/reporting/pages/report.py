"""A report: every phase under every execution on every chip, and the folder of files made of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooftrace._escapes import to_csv
from rooftrace._formats import USUAL
from rooftrace.costmodels.estimating import Estimate, estimate
from rooftrace.costmodels.execution import ExecutionModel, execution_model
from rooftrace.costmodels.planning import Plan, usual_execution
from rooftrace.errors import RequestError
from rooftrace.hardware import Chip
from rooftrace.reporting.pages.files import check_formats, write_report
from rooftrace.reporting.sections import Results
from rooftrace.tracer.graph import OpGraph

if TYPE_CHECKING:
    import pandas


DETECTED = "detected"
"""The name of an execution whose bytes are as rules count them, beside the calibrated one."""


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

        All files are made beside `out` first and then moved in, so nothing is left half-written.
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

    Raises what loading them raises, and RequestError for none, or one that is there twice.
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

    graphs: by phase name.  executions: default naive and the usual one.  progress: is told the
    phase that is being priced.  Before a model with measured factors on bytes stands the same model
    without them, as "detected".
    Raises what `estimate` raises, and RequestError where any of the three is empty, or has a name
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
    main = models[-1].name
    peaks = {phase: next(iter(estimates[phase][main].values())).memory for phase in graphs}
    return Report(estimates, peaks, dict(graphs))


def _with_detected(models: Sequence[ExecutionModel]) -> Iterator[ExecutionModel]:
    """The models, and before the first that has measured factors the same one without them."""
    named = any(model.name == DETECTED for model in models)
    calibrated = next((model for model in models if model.traffic is not None), None)
    for model in models:
        if model is calibrated and not named:
            yield replace(model.by_rules, name=DETECTED)
        yield model
