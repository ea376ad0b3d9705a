"""Costs of a script's turns: training steps, calls without gradients, and the compiled part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rooftrace._plain import Plain
from rooftrace._shown import Shown, short
from rooftrace.costmodels.estimates.estimates import Estimate, estimate
from rooftrace.costmodels.fusion import ExecutionModel
from rooftrace.costmodels.ops import MATRIX
from rooftrace.graph import marks
from rooftrace.hardware import Chip
from rooftrace.hardware.units import format_time, plural
from rooftrace.scripts.steps import Script, Turns
from rooftrace.tracer.phases import collector_paused

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, kw_only=True)
class TurnCost(Plain):
    """Equal turns of a script.  Quantities are of one turn: FLOP, byte, second.

    parts: the estimate of each piece of a turn, and how often it runs.  A step with gradient
    accumulation has several: passes over a batch that are equal are one piece.
    """

    stretch: Turns
    parts: tuple[tuple[Estimate, int], ...]

    @property
    def kind(self) -> str:
        """training or inference."""
        return self.stretch.kind

    @property
    def label(self) -> str:
        """The class of the called module, with the sizes of its tensors."""
        return self.stretch.label

    @property
    def called(self) -> str:
        """The class of the module that was called first, or another cause of the turn."""
        return self.label.partition("(")[0]

    @property
    def turns(self) -> int:
        """Number of such turns."""
        return self.stretch.turns

    @property
    def t_est(self) -> float:
        """Expected seconds on the device."""
        return sum(step.t_est * times for step, times in self.parts)

    @property
    def t_interval(self) -> tuple[float, float] | None:
        """Seconds between which 90 % of such steps were measured; None without knobs."""
        ends = [(step.t_interval, times) for step, times in self.parts if step.t_est]
        intervals = [(end, times) for end, times in ends if end is not None]
        if len(intervals) < len(ends):
            return None
        low, high = (sum(end[side] * times for end, times in intervals) for side in (0, 1))
        return low, high

    @property
    def t_bound(self) -> float:
        """Seconds that it takes at least."""
        return sum(step.t_bound * times for step, times in self.parts)

    @property
    def loading(self) -> float:
        """Seconds of a turn that the host spent in data loaders, measured where the script ran."""
        return self.stretch.loading / self.turns

    @property
    def flops(self) -> int:
        """FLOP, attention counted dense, without recomputation."""
        return sum(step.flops * times for step, times in self.parts)

    @property
    def bytes_hbm(self) -> int:
        """Bytes through HBM."""
        return sum(step.bytes_hbm * times for step, times in self.parts)

    @property
    def bytes_net(self) -> int:
        """Bytes over links."""
        return sum(step.bytes_net * times for step, times in self.parts)

    @property
    def kernels(self) -> int:
        """Kernels launched."""
        return sum(step.kernels * times for step, times in self.parts)

    @property
    def peak(self) -> int:
        """Bytes alive at most."""
        return max((step.memory.peak for step, _ in self.parts), default=0)

    @property
    def largest(self) -> Estimate:
        """The estimate of the piece that takes most of the turn."""
        return max(self.parts, key=lambda part: part[0].t_est * part[1])[0]

    @property
    def mfu(self) -> float | None:
        """Matrix FLOP without recomputation per second over the dense peak of the chip."""
        useful = sum(
            step.plan.total.flops(MATRIX, ("useful",)) * times for step, times in self.parts
        )
        most = self.t_est * self.largest.peak
        return useful / most if most else None

    @property
    def limit(self) -> str:
        """The regime with most of the time: compute, hbm, network or launch."""
        seconds: Counter[str] = Counter()
        for step, times in self.parts:
            for regime, share in step.times.regime_seconds.items():
                seconds[regime] += share * times  # type: ignore[assignment]
        return max(seconds, key=lambda regime: seconds[regime], default="")

    @property
    def _interval(self) -> tuple[float | None, float | None]:
        return self.t_interval or (None, None)

    @property
    def _optimizers(self) -> str:
        return "+".join(self.stretch.optimizers)

    @property
    def _pieces(self) -> list[dict[str, Any]]:
        return [
            {"graph": piece.graph, "times": piece.times, "t_est": step.t_est}
            for piece, (step, _) in zip(self.stretch.pieces, self.parts, strict=True)
        ]

    KEYS = (
        "kind label shape=stretch.shape first=stretch.first turns recorded=stretch.run "
        "by_form=stretch.by_form t_est t_low=_interval.0 t_high=_interval.1 t_bound flops "
        "bytes_hbm bytes_net kernels peak mfu limit loading batches=stretch.batches "
        "brought=stretch.brought taken=stretch.taken optimizers=_optimizers pieces=_pieces"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeCost:
    """Turns of one kind whose first call has inputs of one shape, together.

    called: the class of the module.  t_est, bytes_hbm, flops: of a turn, on the mean; second, byte,
    FLOP.  peak: bytes alive at most.
    """

    kind: str
    called: str
    shape: tuple[int, ...]
    turns: int
    t_est: float
    flops: float
    bytes_hbm: float
    peak: int
    limit: str

    @property
    def per_item(self) -> float:
        """Seconds for each of the items along the first dimension, which is the batch."""
        return self.t_est / max(self.shape[0], 1)


def _together(rows: Sequence[TurnCost]) -> ShapeCost:
    turns = sum(row.turns for row in rows)
    first = rows[0]
    limits: Counter[str] = Counter()
    for row in rows:
        limits[row.limit] += row.turns

    def mean(name: str) -> float:
        return float(sum(getattr(row, name) * row.turns for row in rows) / turns)

    return ShapeCost(
        kind=first.kind,
        called=first.called,
        shape=first.stretch.shape,
        turns=turns,
        t_est=mean("t_est"),
        flops=mean("flops"),
        bytes_hbm=mean("bytes_hbm"),
        peak=max(row.peak for row in rows),
        limit=limits.most_common(1)[0][0],
    )


@dataclass(frozen=True, kw_only=True)
class ScriptCost(Plain, Shown):
    """A script on a chip: its turns, equal ones together, in the order in which they came.

    steps: the estimate of each graph of the script.
    """

    script: Script
    chip: Chip
    execution: ExecutionModel
    rows: tuple[TurnCost, ...]
    steps: tuple[Estimate, ...]

    KEYS = (
        "title script=script.name chip=chip.name execution=execution_name rank=script.rank "
        "world=script.world ended=script.ended code=script.code compiled "
        "seconds_here=script.seconds device_seconds loading_seconds turns=rows shapes=by_shape "
        "emulated=script.said assumptions"
    )

    @cached_property
    def steady(self) -> TurnCost | None:
        """The training steps that the others became alike, else such calls; None without any."""
        stretch = self.script.steady
        if stretch is None:
            return None
        return next(row for row in self.rows if row.stretch.key == stretch.key)

    def whole(self, row: TurnCost) -> Estimate:
        """The estimate of a turn, its pieces as one graph."""
        if len(row.parts) == 1 and row.parts[0][1] == 1:
            return row.parts[0][0]
        return estimate(self.script.graph_of(row.stretch), self.chip, self.execution)

    def by_shape(self) -> tuple[ShapeCost, ...]:
        """Costs of a turn by the shape of its input, as a server's batch changes.

        Only modules called with several shapes are there; the smallest comes first.
        """
        groups: dict[tuple[str, str], dict[tuple[int, ...], list[TurnCost]]] = {}
        for row in self.rows:
            if row.stretch.shape:
                alike = groups.setdefault((row.kind, row.called), {})
                alike.setdefault(row.stretch.shape, []).append(row)
        return tuple(
            _together(shapes[shape])
            for shapes in groups.values()
            if len(shapes) > 1
            for shape in sorted(shapes)
        )

    @property
    def title(self) -> str:
        """The script, the chip and the execution."""
        ranks = f", rank {self.script.rank} of {self.script.world}" if self.script.world > 1 else ""
        return f"{self.script.name} on {self.chip.name}{ranks}, {self.execution_name}"

    @property
    def execution_name(self) -> str:
        """Name of the execution of its turns: eager, compiled or, for both, mixed."""
        names = {step.execution.name for row in self.rows for step, _ in row.parts}
        return names.pop() if len(names) == 1 else self.execution.name

    @cached_property
    def compiled(self) -> CompiledPart | None:
        """The part of the steady turn that the script compiles; None for nothing."""
        if self.steady is None or self.execution.dispatch != "mixed":
            return None
        part = CompiledPart.of(self.steady.parts)
        return part if part.ops else None

    @property
    def device_seconds(self) -> float:
        """Expected seconds of all turns on the device."""
        return sum(row.t_est * row.turns for row in self.rows)

    @property
    def loading_seconds(self) -> float:
        """Seconds that the host spent in data loaders, measured where the script ran."""
        return sum(row.stretch.loading for row in self.rows)

    def assumptions(self) -> tuple[str, ...]:
        """Assumptions on values that no trace has, each sentence once."""
        texts = (a.text for graph in self.script.graphs for a in graph.assumptions)
        return tuple(dict.fromkeys(texts))

    def to_rows(self) -> list[dict[str, Any]]:
        """One mapping for equal turns, in order."""
        return [{k: v for k, v in row.to_dict().items() if k != "pieces"} for row in self.rows]

    def to_frame(self) -> pandas.DataFrame:
        """One row for equal turns, in order; seconds, bytes and FLOP of one turn."""
        import pandas

        return pandas.DataFrame.from_records(self.to_rows())

    def __repr__(self) -> str:
        steady = self.steady
        if steady is None:
            return short(self, f"{self.title}: nothing ran on the device")
        times = plural(steady.turns, "turn")
        return short(self, f"{self.title}: {steady.kind}, {format_time(steady.t_est)} ({times})")


def price_script(script: Script, chip: Chip, model: ExecutionModel) -> ScriptCost:
    """The costs of a script's turns on a chip under an execution model."""
    with collector_paused():
        steps = [estimate(graph, chip, model) for graph in script.graphs]
    rows: dict[object, TurnCost] = {}
    for stretch in script.stretches:
        before = rows.get(stretch.key)
        if before is not None:
            rows[stretch.key] = replace(before, stretch=before.stretch.and_also(stretch))
            continue
        parts = tuple((steps[piece.graph], piece.times) for piece in stretch.pieces)
        rows[stretch.key] = TurnCost(stretch=stretch, parts=parts)
    return ScriptCost(
        script=script, chip=chip, execution=model, rows=tuple(rows.values()), steps=tuple(steps)
    )


# -- compiled --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledPart(Plain):
    """The compiled part of a turn, and the totals of the turn.  callables: arguments of
    torch.compile that ran."""

    flops: int
    ops: int
    of_flops: int
    of_ops: int
    callables: tuple[str, ...]

    @staticmethod
    def of(parts: Sequence[tuple[Estimate, int]]) -> CompiledPart:
        """The compiled part of a turn of these estimates, each with how often it runs."""
        sums = [0, 0, 0, 0]
        names: dict[str, None] = {}
        for step, repeated in parts:
            graph = step.plan.graph
            eager = marks.eager_ops(graph.ops)
            compiled = step.execution.dispatch != "eager"
            for op in graph.kernels():
                times = repeated * graph.times(op)
                amounts = times * step.plan.op_costs[op.id].flops(), times
                inside = compiled and op.id not in eager
                for place, amount in enumerate((*(inside * a for a in amounts), *amounts)):
                    sums[place] += amount
            compiled_by = (op.facts.get(marks.COMPILED) for op in step.plan.source.ops)
            names |= dict.fromkeys(name for name in compiled_by if name)
        flops, ops, of_flops, of_ops = sums
        return CompiledPart(
            flops=flops, ops=ops, of_flops=of_flops, of_ops=of_ops, callables=tuple(sorted(names))
        )

    def __str__(self) -> str:
        share = 100 * self.flops // max(self.of_flops, 1)
        most = 4
        names = ", ".join(self.callables[:most])
        more = len(self.callables) - most
        left = f" and {more} more" if more > 0 else ""
        ops = f"{self.ops:,} of {plural(self.of_ops, 'op')}"
        return f"compiled: {share} % of FLOP, {ops}, in {names}{left}"
