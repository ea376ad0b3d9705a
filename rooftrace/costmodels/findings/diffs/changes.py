"""Records of what changed between two revisions: quantities, modules, phases, source files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rooftrace._plain import Plain
from rooftrace._shown import Shown, short, some
from rooftrace.costmodels.memory import Held
from rooftrace.hardware.units import arrow, format_time
from rooftrace.tracer.changes import Change
from rooftrace.tracer.changes.limits import Limited
from rooftrace.tracer.changes.metrics import TOTALS
from rooftrace.tracer.revisions.origins import DiffOrigins

NONE = Change(0, 0)
"""The change of what a row has nothing of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleChange(Plain):
    """A module, or `count` equal modules whose paths differ only in indices.

    Quantities are over all of the modules.
    """

    path: str
    count: int
    status: str  # added, removed or changed
    kind: str  # name of the module's class
    flops: Change
    bytes: Change
    time: Change
    ops_added: Mapping[str, int]  # operator names with their number, in one of the modules
    ops_removed: Mapping[str, int]
    resized: Sequence[str] = ()  # operators whose sizes or precisions changed

    KEYS = "path count status class=kind flops bytes time ops_added ops_removed resized"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffRow:
    """What one cause changed.  Quantities are over all kernels that it touches.

    modules: where it is, with indices starred, in the order of the step; `count` of them in all.
    before, after: the line of the code ("net.py:12") on either side, None where there is none.
    eager: seconds of the same change in eager mode; None where that was not asked for.
    """

    cause: str
    modules: tuple[str, ...] = ()
    count: int = 0
    before: str | None = None
    after: str | None = None
    time: Change = NONE
    bytes: Change = NONE
    flops: Change = NONE
    kernels: Change = NONE
    eager: Change | None = None

    @property
    def line(self) -> str | None:
        """The line to look at: of the second side, or of the first where it is gone."""
        return self.after or self.before

    @property
    def where(self) -> str:
        """The modules: "layers.*.norm x4", "layers.*.attention.k and 3 more (12)"."""
        if not self.modules:
            return ""
        first = self.modules[0] or "(root)"
        if len(self.modules) > 1:
            return f"{first} and {len(self.modules) - 1} more ({self.count:,})"
        return f"{first} x{self.count:,}" if self.count > 1 else first

    @property
    def lines(self) -> str:
        """The line on either side: "net.py:12 -> net.py:14", one where equal; "" for none."""
        return arrow(self.before or "", self.after or "")

    @property
    def place(self) -> str:
        """The modules and the lines."""
        return ", ".join(filter(None, (self.where, self.lines)))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldChange(Plain):
    """Tensors of one kind of which more or less is held at the peak of memory (byte)."""

    held: Held  # of the second side, or of the first where it is gone
    bytes: Change

    KEYS = (
        "role=held.role module=held.module op=held.op part=held.part name=held.name "
        "dtype=held.dtype saved=held.saved bytes"
    )


@dataclass(frozen=True)
class PhaseDiff(Plain):
    """What changed in one phase.

    rows: one for each cause, the largest change of time first; they add up to the totals of time,
    bytes, flops and kernels.  modules: the same by module.  held: the difference of the memory
    peaks by tensor.  assumed: assumptions that only one side makes, with "+" or "-" before them.
    meshes: processes along each axis, of either side.
    """

    phase: str
    totals: Mapping[str, Change]  # by name in TOTALS, and for several processes in `network_totals`
    modules: tuple[ModuleChange, ...]
    rows: tuple[DiffRow, ...] = ()
    held: tuple[HeldChange, ...] = ()
    assumed: tuple[str, ...] = ()
    meshes: tuple[Mapping[str, int], Mapping[str, int]] = ({}, {})

    KEYS = "totals rows held assumed meshes=_meshes? modules"

    @property
    def _meshes(self) -> Sequence[Mapping[str, int]]:
        return self.meshes if any(self.meshes) else ()

    @property
    def mesh_changed(self) -> bool:
        """Whether the two are steps on other meshes."""
        first, second = self.meshes
        return list(first.items()) != list(second.items())

    def __repr__(self) -> str:
        return short(self, f"{self.phase}: {_in_short(self)}; {len(self.modules):,} modules differ")


@dataclass(frozen=True)
class Sources:
    """The source files of two revisions."""

    files: tuple[int, int]  # how many there are of each
    differing: tuple[str, ...] = ()  # names of those that differ, or that one side alone has
    same_place: bool = False  # whether both were read from the very same files


@dataclass(frozen=True, kw_only=True)
class Diff(Plain, Shown, Limited):
    """The difference of two revisions on one chip under one execution model."""

    names: tuple[str, str]
    chips: tuple[str, str]
    executions: tuple[str, str]
    phases: tuple[PhaseDiff, ...]
    only_before: tuple[str, ...] = ()  # phases that only one side has
    only_after: tuple[str, ...] = ()
    sources: Sources | None = None  # the files that the two were made of, where that is known
    expected: bool = True  # what times are: expected ones, by knobs, or bounds
    origins: DiffOrigins | None = None  # revisions, options and versions of the sides
    # The estimates of both sides, by title, for a timeline.
    steps: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    METRICS = TOTALS
    EXAMPLE = "memory>1 GiB"
    schema = "rooftrace.diff/1"
    KEYS = (
        "schema before=names.0 after=names.1 chip chips execution executions time_is only_before "
        "only_after sources origins phases=_by_phase"
    )

    @property
    def chip(self) -> str:
        """The chip, or both: "h100-sxm -> h200-sxm"."""
        return arrow(*self.chips)

    @property
    def execution(self) -> str:
        """The execution model, or both: "eager -> compiled"."""
        return arrow(*self.executions)

    @property
    def unchanged(self) -> bool:
        """True where no phase, no total and no module differs."""
        return (
            not self.only_before
            and not self.only_after
            and all(
                not p.modules
                and not p.rows
                and not p.held
                and not p.mesh_changed
                and not any(c.delta for c in p.totals.values())
                for p in self.phases
            )
        )

    def places(self) -> list[tuple[str, Mapping[str, Change]]]:
        """The totals of each phase."""
        return [(f"{phase.phase}: ", phase.totals) for phase in self.phases]

    def __repr__(self) -> str:
        kind = "expected" if self.expected else "bound"
        before, after = self.names
        changes = [f"{phase.phase} {kind} {_in_short(phase)}" for phase in self.phases]
        names = f"{before} -> {after} on {self.chip}, {self.execution}"
        return short(self, f"{names}: {some(changes)}" if changes else names)

    @property
    def time_is(self) -> str:
        """What its seconds are: "expected", by knobs, or a "bound"."""
        return "expected" if self.expected else "bound"

    @property
    def _by_phase(self) -> dict[str, PhaseDiff]:
        return {phase.phase: phase for phase in self.phases}


def _in_short(phase: PhaseDiff) -> str:
    """ "738.2 us -> 1.08 ms (+46.6 %)": the time of a step before and after."""
    time = phase.totals["time"]
    relative = "" if time.relative is None else f" ({time.relative:+.1%})"
    return f"{format_time(time.before)} -> {format_time(time.after)}{relative}"
