"""What a changed step costs beside the step as it is: one what-if, and all of them in order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

from rooftrace._plain import Plain
from rooftrace._shown import short
from rooftrace.costmodels.estimating import Estimate
from rooftrace.costmodels.studies import Compared
from rooftrace.costmodels.timing.timings import REGIMES, ranked
from rooftrace.hardware.units import (
    format_flops,
    format_share,
    format_time,
    format_traffic,
)

if TYPE_CHECKING:
    import pandas

LEVERS = (
    "attention",
    "fusion",
    "launch",
    "rewrite",
    "compute",
    "weights",
    "cache",
    "kernels",
    "together",
)
"""What a what-if changes: the attention kernel, which ops share a kernel, how kernels are launched,
the graph, the precision of everything, of the weights, or of the KV cache, kernels larger than a
compiler makes; the last is several of these at once."""


@dataclass(frozen=True, kw_only=True)
class WhatIf(Plain, Compared):
    """A step with one thing changed, beside the step without the change; both are estimates."""

    lever: Annotated[str, ("enum", LEVERS)]  # what is changed
    action: str  # what to do, a sentence
    option: str  # what asks rooftrace for the same; empty where nothing does
    needs: str  # what it assumes or costs
    at_most: bool = False  # whether the gain is an upper bound

    KEYS = (
        "lever action option t_before t_after gain share at_most acts_on needs rests_on peak fits"
    )

    @cached_property
    def acts_on(self) -> Annotated[str, ("enum", REGIMES)]:
        """The regime that loses most seconds: compute, hbm, network or launch."""
        return ranked(self.regime_seconds)[0]

    @cached_property
    def rests_on(self) -> str:
        """What differs between the two steps in FLOP, HBM bytes and kernels; none of it is time."""
        before, after = self.before, self.after
        texts = {
            "": (format_flops(before.flops), format_flops(after.flops)),
            "HBM ": (format_traffic(before.bytes_hbm), format_traffic(after.bytes_hbm)),
            "kernels ": (f"{before.kernels:,}", f"{after.kernels:,}"),
        }
        changed = [f"{of}{was} -> {now}" for of, (was, now) in texts.items() if was != now]
        return ", ".join(changed) or "the same FLOP, bytes and kernels"

    @property
    def peak(self) -> int:
        """Bytes alive at the peak of the step with the change."""
        return self.after.memory.peak

    @property
    def fits(self) -> bool:
        """Whether the step with the change fits the chip."""
        return self.after.memory.fits(self.after.chip)

    def __repr__(self) -> str:
        return short(self, str(self))

    def __str__(self) -> str:
        most = "at most " if self.at_most else ""
        return (
            f"{self.action}: {format_time(self.t_before)} -> {format_time(self.t_after)}, "
            f"{most}{format_time(self.gain)} less ({format_share(self.share)})"
        )


@dataclass(frozen=True)
class Guidance(Plain):
    """What would help a step, most seconds first.  Each gain is that of the change alone.

    together: those that go together, priced as one change; None for fewer than two.  Gains do not
    add up to it.
    """

    step: Estimate
    options: tuple[WhatIf, ...]
    together: WhatIf | None = None

    KEYS = "execution=step.execution.name what_ifs=options together?"

    def to_frame(self) -> pandas.DataFrame:
        """One row per what-if, in order, the last one for all together; seconds and bytes."""
        import pandas

        every = (*self.options, *([self.together] if self.together else []))
        return pandas.DataFrame.from_records(
            [what_if.to_dict() for what_if in every], columns=WhatIf.KEYS.split()
        )

    def __repr__(self) -> str:
        step = self.step
        best = f"first: {self.options[0]}" if self.options else "nothing that is modelled"
        return short(
            self,
            f"{step.graph.title} on {step.chip.name}, {step.execution.name}, "
            f"{format_time(step.t_est)}; {best}",
        )

    def __str__(self) -> str:
        lines = [f"{number}. {what_if}" for number, what_if in enumerate(self.options, 1)]
        if self.together is not None:
            lines.append(str(self.together))
        return "\n".join(lines) or "nothing that is modelled would save 1 % of the step"
