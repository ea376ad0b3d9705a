"""Numbers of a chip and of an execution model by dotted names, read, and replaced in new records.

"chip.memory_bandwidth", "chip.matrix.bf16", "chip.link.intra.bandwidth"; "execution.elementwise",
"execution.weight_residency.moe"; "knobs.launch", "knobs.share.mm.compute".  The beginning of names
up to a dot stands for all of them: "chip.matrix" is every rate of the matrix engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.kernels import attention_knobs
from rooftrace.costmodels.knobs import Knobs, numbers
from rooftrace.errors import RequestError, hint
from rooftrace.hardware import Chip
from rooftrace.hardware.chip import FACT_UNITS, Fact

OWNERS = ("chip", "execution", "knobs")


class UnknownNumberError(RequestError):
    """A name that no number of a chip or an execution has, or a value that it cannot take."""


@dataclass(frozen=True)
class NamedNumbers:
    """A chip and an execution, and their numbers by name.

    Knobs that stand for those of the chip's kind are written out, so that each has its own number;
    a mixed step has two of each, and so no numbers for them.
    """

    chip: Chip
    execution: ExecutionModel

    @staticmethod
    def of(chip: Chip, execution: ExecutionModel) -> NamedNumbers:
        """Those of an execution on a chip, with the constants that times are computed with."""
        if isinstance(execution.knobs, str) and execution.dispatch != "mixed":
            execution = replace(execution, knobs=execution.knobs_on(chip))
        knobs = execution.knobs
        if isinstance(knobs, Knobs) and isinstance(knobs.attention, str):
            own = attention_knobs(knobs.attention, chip, execution.attention_library)
            execution = replace(execution, knobs=replace(knobs, attention=own))
        return NamedNumbers(chip, execution)

    @cached_property
    def facts(self) -> Mapping[str, Fact]:
        """Facts of the chip by name, those that are not known left out."""
        return {f"chip.{name}": fact for name, fact in self.chip.facts_by_name().items()}

    @cached_property
    def knobs(self) -> Mapping[str, float]:
        """Numbers of the execution and its knobs by name."""
        known = {
            f"execution.{name}": value
            for name, value in numbers.numbers_of(replace(self.execution, knobs=None)).items()
        }
        if isinstance(self.execution.knobs, Knobs):
            own = numbers.numbers_of(replace(self.execution.knobs, residuals={}))
            if own["pace"] == 1:
                del own["pace"]  # that all of it is so much faster tells nothing
            for name, value in own.items():
                part, dot, rest = name.partition(".")
                known[f"knobs.{'share' if part == 'shares' else part}{dot}{rest}"] = value
        return known

    @cached_property
    def values(self) -> Mapping[str, float]:
        """All numbers by name, in SI units."""
        return {**{name: fact.value for name, fact in self.facts.items()}, **self.knobs}

    def named(self, name: str) -> tuple[str, ...]:
        """The numbers that a name stands for.

        Raises UnknownNumberError where there is none: it says the nearest.
        """
        names = tuple(n for n in self.values if n == name or n.startswith(f"{name}."))
        if names:
            return names
        beginnings = {n.rsplit(".", part)[0] for n in self.values for part in (1, 2)}
        known = [n for n in (*self.values, *beginnings) if n not in OWNERS]
        owner = name.partition(".")[0]
        own = [n for n in self.values if n.startswith(f"{owner}.")]
        told = hint(name, known)
        if not told and own:
            told = f"; {owner} has {', '.join(own[:12])}" + (", ..." if len(own) > 12 else "")
        elif owner == "knobs" and not own:
            told = "; no knobs are in use"
        raise UnknownNumberError(
            f"{name!r}: no number of {self.chip.name} or of {self.execution.name} has this name"
            f"{told}"
        )

    def unit(self, name: str) -> str:
        """The unit of a number; "" of factors and shares."""
        if name.startswith("chip."):
            parts = name.split(".")
            if parts[1] in ("matrix", "vector"):
                return "FLOP/s"
            if parts[1] == "link":
                return "byte/s" if parts[-1] == "bandwidth" else "second"
            return FACT_UNITS[parts[1]]
        knobs = self.execution.knobs
        of_knob = name.startswith("knobs.") and isinstance(knobs, Knobs)
        facts = numbers.facts_of(knobs, _path(name)) if of_knob else None
        return facts.unit if facts else ""

    def is_count(self, name: str) -> bool:
        """Whether a number is a whole one: multiprocessors, bits of a bus."""
        return self.unit(name) == "count"

    def changed(self, values: Mapping[str, float]) -> NamedNumbers:
        """A chip and an execution with other numbers.

        Raises UnknownNumberError for a number that the record refuses, and for a name that is none.
        """
        chip, execution = self.chip, self.execution
        for name, value in values.items():
            if name not in self.values:
                self.named(name)
                raise UnknownNumberError(f"{name!r}: it stands for several numbers; name each")
            if name.startswith("chip."):
                if not 0 < value < math.inf:
                    raise UnknownNumberError(f"{name}={value!r}: expected a number above 0")
                chip = chip.with_facts({name.removeprefix("chip."): value})
                continue
            path = {_path(name): value}
            try:
                if name.startswith("knobs."):
                    knobs = numbers.with_numbers(execution.knobs, path)
                    execution = replace(execution, knobs=knobs)
                else:
                    execution = numbers.with_numbers(execution, path)
            except ValueError as error:
                raise UnknownNumberError(f"{name}={value:g}: {error}") from None
        return NamedNumbers(chip, execution)


def _path(name: str) -> str:
    """The path of a number in its record: "shares.mm.compute" of "knobs.share.mm.compute"."""
    path = name.partition(".")[2]
    return f"shares.{path.removeprefix('share.')}" if path.startswith("share.") else path
