"""A report: every phase under every execution on every chip, and the folder of files made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.estimating import Estimate, estimate
from rooftrace.costmodels.execution import ExecutionModel, execution_model
from rooftrace.costmodels.findings import Headroom, headroom
from rooftrace.costmodels.memory import LargestBatch, Memory, memory
from rooftrace.costmodels.planning import plan
from rooftrace.hardware import Chip, load_chip
from rooftrace.tracer.graph import Assumption, OpGraph

if TYPE_CHECKING:
    import pandas

FORMATS = ("md", "json", "csv", "png")
"""What a report has unless it is asked for other formats."""
ALL_FORMATS = (*FORMATS, "trace")


@dataclass(frozen=True)
class Report:
    """Estimates by phase, execution and chip name, in the order they were asked for.

    print() shows one screen; `to_dict()` is report.json; `write()` makes a folder.  The first chip
    is the one that tables show; `main` is the execution that they break down.  largest: the largest
    batch that fits, by phase and chip, where that was asked for.
    """

    estimates: Mapping[str, Mapping[str, Mapping[str, Estimate]]]
    memory: Mapping[str, Memory]
    graphs: Mapping[str, OpGraph]
    largest: Mapping[str, Mapping[str, LargestBatch]] = field(default_factory=dict)

    @property
    def phases(self) -> tuple[str, ...]:
        """Names of the phases."""
        return tuple(self.estimates)

    @property
    def executions(self) -> tuple[str, ...]:
        """Names of the execution models."""
        return tuple(next(iter(self.estimates.values())))

    @property
    def main(self) -> str:
        """The execution that breakdowns show: efficient where it was asked for, else the last."""
        return "efficient" if "efficient" in self.executions else self.executions[-1]

    @property
    def chips(self) -> tuple[Chip, ...]:
        """The chips."""
        by_execution = next(iter(self.estimates.values()))
        return tuple(one.chip for one in next(iter(by_execution.values())).values())

    @property
    def model(self) -> Mapping[str, Any]:
        """Name and parameter counts."""
        return next(iter(self.graphs.values())).model

    @property
    def workload(self) -> dict[str, Any]:
        """What all phases share; a key whose value differs between phases is left out."""
        shared: dict[str, Any] = {}
        differing = set()
        for graph in self.graphs.values():
            for key, value in graph.workload.items():
                if value is not None and shared.setdefault(key, value) != value:
                    differing.add(key)
        return {key: value for key, value in shared.items() if key not in differing}

    @property
    def assumptions(self) -> tuple[tuple[str, Assumption], ...]:
        """(phase, assumption) for every assumption that the traces rest on."""
        return tuple(
            (phase, assumption)
            for phase, graph in self.graphs.items()
            for assumption in graph.assumptions
        )

    def resting_share(self, phase: str, assumption: int) -> float:
        """Share of t_est in kernels that rest on an assumption, main execution, first chip."""
        one = self.estimate(phase)
        return one.assumption_seconds.get(assumption, 0.0) / one.t_est if one.t_est else 0.0

    def estimate(
        self, phase: str, execution: str | None = None, chip: str | None = None
    ) -> Estimate:
        """One estimate; by default of the main execution on the first chip."""
        by_chip = self.estimates[phase][execution or self.main]
        return by_chip[chip] if chip else next(iter(by_chip.values()))

    @cached_property
    def headroom(self) -> Mapping[str, Headroom]:
        """What fusing saves by phase: main execution, first chip."""
        return {phase: headroom(self.estimate(phase)) for phase in self.phases}

    def of_first_chip(self) -> Iterator[tuple[str, str, Estimate]]:
        """(phase, execution, estimate) on the first chip, in order."""
        for phase, executions in self.estimates.items():
            for execution, by_chip in executions.items():
                yield phase, execution, next(iter(by_chip.values()))

    def to_dict(self) -> dict[str, Any]:
        """The contents of report.json (report.schema.json); the same for the same inputs."""
        from rooftrace.reporting.sections import document

        return document(self)

    def to_frame(self) -> pandas.DataFrame:
        """Rows of kernels of each phase and execution on the first chip, as `Estimate.to_frame`."""
        import pandas

        return pandas.concat(list(self.frames()), ignore_index=True)

    def frames(self) -> Iterator[pandas.DataFrame]:
        """The parts of `to_frame`, one for each phase and execution."""
        for phase, execution, one in self.of_first_chip():
            frame = one.to_frame()
            for position, (name, value) in enumerate(
                (("phase", phase), ("execution", execution), ("chip", one.chip.name))
            ):
                frame.insert(position, name, value)
            yield frame

    def write(self, out: str | Path, formats: Sequence[str] = FORMATS) -> list[Path]:
        """Write report.md, report.json, ops.csv and figures into the folder `out`; their paths.

        The format "trace" adds timeline_<phase>.json.gz, for Perfetto.

        All files are made beside `out` first and then moved in, so nothing is left half-written.
        Raises ReportFolderError where the folder cannot be written, ValueError for a format not in
        ALL_FORMATS.
        """
        from rooftrace.reporting.pages.files import write_report

        return write_report(self, Path(out), formats)

    def __rich__(self) -> Any:
        from rooftrace.reporting.pages.table import render_report

        return render_report(self)

    def __str__(self) -> str:
        from rooftrace.reporting.pages.table import render_text

        return render_text(self)


def build_report(
    graphs: Mapping[str, OpGraph],
    chips: Sequence[str | Chip] = ("h200-sxm",),
    executions: Sequence[str | ExecutionModel] = ("naive", "efficient"),
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Price each graph under each execution model and put it on each chip.

    `graphs` is by phase name; `progress` is told the phase and execution that is being priced.
    Raises what `estimate` raises, and ValueError where any of the three is empty.
    """
    for name, given in (("graphs", graphs), ("chips", chips), ("executions", executions)):
        if not given:
            raise ValueError(f"build_report({name}=...): expected at least one, got none")
    targets = [load_chip(chip) for chip in chips]
    models = [execution_model(execution) for execution in executions]
    for name, known in (
        ("chips", [chip.name for chip in targets]),
        ("executions", [model.name for model in models]),
    ):
        for key in known:
            if known.count(key) > 1:
                raise ValueError(
                    f"build_report({name}=...): {key!r} is there twice; names tell them apart"
                )
    estimates: dict[str, dict[str, dict[str, Estimate]]] = {}
    for phase, graph in graphs.items():
        estimates[phase] = {}
        for model in models:
            if progress:
                progress(f"{phase}, {model.name}")
            planned = plan(graph, model)
            estimates[phase][model.name] = {chip.name: estimate(planned, chip) for chip in targets}
    return Report(
        estimates, {phase: memory(graph) for phase, graph in graphs.items()}, dict(graphs)
    )
