"""Steps of several models as points of a roofline."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooftrace._escapes import file_part
from rooftrace._plain import Plain
from rooftrace._shown import Shown, short, some
from rooftrace.costmodels.estimates import Estimate
from rooftrace.costmodels.timing.streams import has_streams
from rooftrace.errors import RequestError
from rooftrace.hardware.units import format_time, plural
from rooftrace.reporting.renderers import words

if TYPE_CHECKING:
    import pandas

    from rooftrace.reporting.sections import Results

SIZES = ("batch", "seq", "kv")


@dataclass(frozen=True, slots=True)
class RooflineRow(Plain):
    """One step on one chip.  sizes: batch, seq and kv, as far as the step has them."""

    model: str
    sizes: Mapping[str, int]
    estimate: Estimate

    @property
    def phase(self) -> str:
        """The name of the phase."""
        return self.estimate.phase

    @property
    def chip(self) -> str:
        """The name of the chip."""
        return self.estimate.chip.name

    @property
    def dtype(self) -> str:
        """The precision of the model."""
        graph = self.estimate.graph
        return str(graph.workload.get("dtype") or graph.model.get("dtype") or "")

    @property
    def label(self) -> str:
        """ "gpt2 decode, batch 8 on l4"."""
        sizes = [f"{name} {size:,}" for name, size in self.sizes.items()]
        return f"{', '.join([f'{self.model} {self.phase}', *sizes])} on {self.chip}"

    @property
    def intensity(self) -> float | None:
        """FLOP for each byte of HBM; None where no byte moves."""
        return self.estimate.ai_hbm

    @property
    def rate(self) -> float | None:
        """FLOP/s of the time of the step; None of a step that has no point."""
        flops, seconds = self.estimate.flops_causal, self.estimate.t_est
        return flops / seconds if flops and seconds and self.intensity else None

    @property
    def roof(self) -> float | None:
        """FLOP/s that the chip allows at this intensity, at the peak that the step mostly uses."""
        if self.intensity is None:
            return None
        chip = self.estimate.chip
        return min(self.estimate.peak, chip.memory_bandwidth.value * self.intensity)

    @property
    def share(self) -> float | None:
        """The rate over the roof."""
        return None if self.rate is None or not self.roof else self.rate / self.roof

    @property
    def launch_rate(self) -> float | None:
        """FLOP/s that launches allow: the host's time, or the gaps between kernels if longer.

        None where that takes no time, or is not known, as of a step of several streams.
        """
        if has_streams(self.estimate.plan):
            return None
        gaps = sum(row.timing.gap for row in self.estimate.rows)
        seconds = max(self.estimate.times.t_host, gaps)
        return self.estimate.flops_causal / seconds if seconds else None

    @property
    def network_rate(self) -> float | None:
        """FLOP/s at which the network carries the traffic of the step; None without traffic."""
        seconds = self.estimate.times.t_net
        return self.estimate.flops_causal / seconds if seconds else None

    @property
    def _sizes(self) -> dict[str, int | None]:
        return {name: self.sizes.get(name) for name in SIZES}

    KEYS = (
        "model phase **_sizes chip execution=estimate.execution.name flops=estimate.flops_causal "
        "bytes_hbm=estimate.bytes_hbm intensity rate roof share ridge=estimate.ridge launch_rate "
        "network_rate t_est=estimate.t_est limit=estimate.times.regime"
    )


@dataclass(frozen=True, repr=False)
class Rooflines(Shown):
    """Steps of models, phases and sizes on chips, in the order of the call.

    over: the size that has several values, "" for none.
    """

    rows: tuple[RooflineRow, ...]
    over: str = ""

    def __repr__(self) -> str:
        steps = some(f"{r.label} {format_time(r.estimate.t_est)}" for r in self.rows)
        return short(self, steps)

    def plot(self, path: str | os.PathLike[str], *, style: str = "screen") -> None:
        """Draw all steps on one roofline: a PNG, SVG or PDF, as the file ends.

        style: "screen", "paper" (7.2 in wide) or "paper-column" (3.5 in).  Raises RequestError for
        another ending or style.
        """
        from rooftrace.reporting.figures import roofline

        roofline.draw_roofline(self, Path(path), style)

    @cached_property
    def models(self) -> list[str]:
        """Names of the models."""
        return list(dict.fromkeys(row.model for row in self.rows))

    @cached_property
    def phases(self) -> list[str]:
        """Names of the phases."""
        return list(dict.fromkeys(row.phase for row in self.rows))

    @cached_property
    def chips(self) -> list[str]:
        """Names of the chips."""
        return list(dict.fromkeys(row.chip for row in self.rows))

    @cached_property
    def dtypes(self) -> list[str]:
        """Names of the precisions of the models."""
        return sorted({row.dtype for row in self.rows} - {""})

    @property
    def lines(self) -> Iterator[list[RooflineRow]]:
        """Rows of one model, phase and chip, by rising size."""
        lines: dict[tuple[str, str, str], list[RooflineRow]] = {}
        for row in self.rows:
            lines.setdefault((row.model, row.phase, row.chip), []).append(row)
        yield from lines.values()

    @property
    def conditions(self) -> str:
        """The conditions that all steps share: "bf16; decode 8 x 1 token; efficient; h200-sxm"."""
        told = [f"{p} {text}".strip() for p in self.phases for text in self._workloads(p)]
        shared = {n: size for row in self.rows for n, size in row.sizes.items()}
        parts = [
            ", ".join(self.dtypes),
            *(told if self._told else [", ".join(self.phases)]),
            f"over {self.over}" if self.over else "",
            *(f"{n} {shared[n]:,}" for n in shared if self.over and n not in self.varying),
            self.rows[0].estimate.execution.name,
            ", ".join(self.chips),
        ]
        return "; ".join(filter(None, parts))

    @property
    def varying(self) -> list[str]:
        """The names of sizes that the conditions do not tell, in order."""
        least = 1 if self.over or self._told else 0
        return [n for n in SIZES if len({row.sizes.get(n) for row in self.rows} - {None}) > least]

    @property
    def _told(self) -> bool:
        """Whether the conditions tell the sizes of every phase."""
        return not self.over and all(map(self._workloads, self.phases))

    def _workloads(self, phase: str) -> list[str]:
        """The workload of the steps of a phase, where it is the same."""
        texts = {
            words.workload_words(phase, row.estimate.graph.workload)
            for row in self.rows
            if row.phase == phase
        }
        return list(texts) if len(texts) == 1 else []

    def to_rows(self) -> list[dict[str, Any]]:
        """A row for each step, as a CSV file takes them."""
        return [row.to_dict() for row in self.rows]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"over": self.over or None, "steps": self.to_rows()}

    def to_frame(self) -> pandas.DataFrame:
        """One row for each step: sizes, FLOP/byte, FLOP/s, the roof, further limits, seconds."""
        import pandas

        return pandas.DataFrame.from_records(self.to_rows())


def sizes_run(step: Estimate) -> dict[str, int]:
    """The sizes of a step: the prompt's of all but decode, the cache's of decode."""
    other, workload = "seq" if step.phase == "decode" else "kv", step.graph.workload
    return {n: int(workload[n]) for n in SIZES if n != other and workload.get(n)}


# -- several reports ---

FIGURE = "roofline"
PAGE = "comparison"
"""Names of the files of several reports together."""


@dataclass(frozen=True, repr=False)
class Reports(Shown):
    """Reports by target, in the order of the call; failures: the errors of other targets.

    `roofline` has the steps of the main execution of each report; print() shows them as a table,
    and the failures below it.  names: of the targets there; default: those of their folders.
    """

    reports: Mapping[str, Results]
    failures: Mapping[str, str]
    names: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        failed = f"; {len(self.failures)} failed" if self.failures else ""
        return short(self, f"{some(self.reports)}{failed}")

    @property
    def roofline(self) -> Rooflines | None:
        """The steps of all reports; None without any."""
        rows = tuple(self._rows())
        return Rooflines(rows) if rows else None

    def _rows(self) -> Iterator[RooflineRow]:
        names = self.names or names_of(list(self.reports))
        for target, made in self.reports.items():
            for phase in made.phases:
                for step in made.estimates[phase][made.main].values():
                    yield RooflineRow(names[target], sizes_run(step), step)

    def to_rows(self) -> list[dict[str, Any]]:
        """A row for each step, as a CSV file takes them."""
        return self.roofline.to_rows() if self.roofline is not None else []

    def to_dict(self) -> dict[str, Any]:
        """All steps, and the failures; each report has its own numbers."""
        return {"steps": self.to_rows(), "failures": dict(self.failures)}


def check_names(names: Sequence[str] | None, targets: Sequence[Any]) -> None:
    """Raise RequestError where names are not one for each target."""
    if names is not None and (len({*names} - {""}), len(names)) != (len(targets),) * 2:
        raise RequestError(
            f"names {','.join(names)!r}: expected {plural(len(targets), 'name')}, one for each "
            "target and no two alike"
        )


def names_of(targets: Sequence[str]) -> dict[str, str]:
    """A short name for each target, which is also the name of its folder.

    The last part of its path where that is unique, else all of it, else with a number.
    """
    last = {target: _short(target) for target in targets}
    full = {target: file_part(target).strip("_.") or "target" for target in targets}
    made: dict[str, str] = {}
    taken = {PAGE, FIGURE}
    for target in targets:
        name = last[target] if list(last.values()).count(last[target]) == 1 else full[target]
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
