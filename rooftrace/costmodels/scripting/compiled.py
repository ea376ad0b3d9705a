"""What of a turn runs in code that the script compiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rooftrace._plain import Plain
from rooftrace.costmodels.estimating import Estimate
from rooftrace.hardware.units import plural
from rooftrace.tracer.collectives import marks


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledPart(Plain):
    """What of a turn is compiled, beside all of it.  callables: what torch.compile was called on,
    of those that ran."""

    flops: int
    ops: int
    of_flops: int
    of_ops: int
    callables: tuple[str, ...]

    @staticmethod
    def of(parts: Sequence[tuple[Estimate, int]]) -> CompiledPart:
        """That of a turn of these parts, each of which runs so often."""
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
            told = (op.facts.get(marks.COMPILED) for op in step.plan.source.ops)
            names |= dict.fromkeys(name for name in told if name)
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
