"""Numbers of a record that sizes change, and how each is computed: at one place, or at many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from rooftrace.tracer.formulas import Formula, functions
from rooftrace.tracer.graphforms.leaves import Path

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

Numbers = tuple[int, ...]
"""A value for each size of a form."""


class Draw(Struct, frozen=True, omit_defaults=True):
    """What a number of rows reach on average, each choosing some of many classes.

    beside: what is reached besides, as all rows of a table that is zeroed before some are written.
    """

    function: str  # a name in FUNCTIONS
    rows: Formula
    chosen: Formula
    classes: Formula
    beside: Formula = Formula()

    @property
    def is_constant(self) -> bool:
        """Whether no size changes it."""
        return all(part.is_constant for part in self.parts)

    @property
    def parts(self) -> tuple[Formula, Formula, Formula, Formula]:
        """All formulas, in the order of the fields."""
        return self.rows, self.chosen, self.classes, self.beside

    def at(self, numbers: Numbers) -> float:
        """The number that is reached."""
        rows, chosen, classes, beside = (part.at(numbers) for part in self.parts)
        return beside + functions.FUNCTIONS[self.function](rows, chosen, classes)

    def over(self, columns: Sequence[Array]) -> Array:
        """The numbers that are reached at many points; equal draws are computed once."""
        import numpy as np

        count = max((len(column) for column in columns), default=1)
        arguments = [np.broadcast_to(formula.over(columns), (count,)) for formula in self.parts]
        function = functions.FUNCTIONS[self.function]
        known: dict[tuple[int, ...], float] = {}
        reached = np.empty(count)
        for place, key in enumerate(zip(*(a.tolist() for a in arguments), strict=True)):
            value = known.get(key)
            if value is None:
                value = known[key] = key[3] + function(*key[:3])
            reached[place] = value
        return reached

    def written(self, names: Sequence[str]) -> str:
        """The function with its arguments: "distinct(8 batch, 8, 256)"."""
        *arguments, beside = (part.written(names) for part in self.parts)
        drawn = f"{self.function}({', '.join(arguments)})"
        return f"({beside} + {drawn})" if self.beside.terms else drawn


PLAIN, TEXT, REACHED, TOUCHED, EACH = "plain", "text", "reached", "touched", "each"
"""What a slot holds: a formula; a text with formulas; a draw; round(formula x draw), which are the
bytes of what a draw touches; formula / draw, which are the rows of each class."""


class Varying(Struct, frozen=True):
    """A number of a record that sizes change; for a text, all its numbers.

    formulas: places among the formulas of the form.  draw: the place among its draws.  words: those
    around the numbers of a text.  whole: a result that is whole stands as an int.
    """

    path: Path
    kind: str = PLAIN
    formulas: tuple[int, ...] = ()
    draw: int = -1
    words: tuple[str, ...] = ()
    commas: bool = False
    whole: bool = True

    def value(self, values: Sequence[int], reached: Sequence[float]) -> Any:
        """The number or text, from those of all formulas and draws."""
        if self.kind == TEXT:
            shown = [f"{values[i]:,}" if self.commas else str(values[i]) for i in self.formulas]
            return self.words[0] + "".join(
                number + word for number, word in zip(shown, self.words[1:], strict=True)
            )
        if self.kind == PLAIN:
            return values[self.formulas[0]]
        number = self.number(
            values[self.formulas[0]] if self.formulas else 0,
            reached[self.draw] if self.draw >= 0 else 0.0,
        )
        return int(number) if self.whole and float(number).is_integer() else number

    def number(self, value: Any, reached: Any) -> Any:
        """The number from that of its formula and that of its draw; also of arrays of them."""
        if self.kind == REACHED:
            return reached
        if self.kind == TOUCHED:
            return touched(value, reached)
        return each(value, reached) if self.kind == EACH else value


def touched(size: Any, reached: Any) -> Any:
    """Bytes of what is reached, of so many bytes each, rounded as rules do."""
    product = size * reached
    return product.round() if hasattr(product, "round") else round(product)


def each(rows: Any, reached: Any) -> Any:
    """Rows of each class that is reached, if at least one is."""
    if hasattr(reached, "clip"):
        return rows / reached.clip(min=1)
    return rows / max(reached, 1)
