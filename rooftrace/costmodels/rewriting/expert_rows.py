"""What integers say of the rows of routed experts: their order, their tokens, where experts end.

T tokens have k experts each; row t k + j is the j-th of token t.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rooftrace.costmodels.rewriting.editing import operand
from rooftrace.costmodels.rewriting.places import Places
from rooftrace.costmodels.rewriting.regions import straight
from rooftrace.tracer.arguments import Ref
from rooftrace.tracer.graph import Op


@dataclass(frozen=True, slots=True)
class Said:
    """What an integer tensor says.

    order: the rows, sorted by expert.  sorted: the experts in this order.  token: the tokens of the
    rows in this order.  back: where each row stands in this order.  counts: rows of each expert.
    ends: where the rows of each expert end.  others: which rows, in this order, are of experts that
    other processes have.
    """

    word: str
    chosen: int  # the value with the experts of all rows
    count: int = 0  # k, where the word is token


class ExpertRows:
    """What the integers of a graph say."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self._known: dict[int, Said | None] = {}

    def says(self, value: int) -> Said | None:
        """What a value says; None for any other value."""
        value = straight(self.places, value)
        if value not in self._known:
            self._known[value] = None
            op = self.places.made_by(value)
            reader = None if op is None else _READERS.get(op.name.rstrip("_"))
            if op is not None and reader is not None:
                self._known[value] = reader(self, op, op.outputs.index(value))
        return self._known[value]

    def index(self, op: Op | None) -> int | None:
        """The numbers of the rows that an op takes, or puts; None for an op that does neither."""
        if op is None or op.name.rstrip("_") not in _BY_NUMBER or op.arguments.get("dim", 0) != 0:
            return None
        items = op.arguments.get("indices", op.arguments.get("index"))
        if isinstance(items, tuple) and len(items) == 1:
            (items,) = items
        return items.id if isinstance(items, Ref) else None

    def taken(self, value: int) -> tuple[int, Said] | None:
        """What rows were taken of, and what their numbers say."""
        op = self.places.made_by(value)
        index = self.index(op) if op is not None and op.name in _TAKES else None
        said = None if index is None else self.says(index)
        return None if op is None or said is None else (op.inputs[0], said)

    def ends_are_of(self, op: Op, chosen: int) -> bool:
        """Whether a grouped product has the rows of each expert that was chosen, of all of them."""
        offsets = op.arguments.get("offs")
        said = self.says(offsets.id) if isinstance(offsets, Ref) else None
        weight = self.places.graph.values[operand(op, "mat2").id].shape
        experts = self.places.graph.values[operand(op, "offs").id].shape[0] if said else 0
        return said == Said("ends", chosen) and len(weight) == 3 and weight[0] == experts

    def unmasked(self, value: int, chosen: int) -> int:
        """Rows before those of other processes' experts were made zero, which no product makes."""
        value = straight(self.places, value)
        op = self.places.made_by(value)
        if (
            op is None
            or op.name.rstrip("_") != "aten.masked_fill"
            or op.arguments.get("value") != 0
        ):
            return value
        said = self.says(operand(op, "mask").id)
        return value if said != Said("others", chosen) else straight(self.places, op.inputs[0])

    def in_order(self, value: int, chosen: int) -> int | None:
        """The numbers, one for each row, that a value has in the order of the experts."""
        taken = self.taken(straight(self.places, value))
        if taken is None or taken[1] != Said("order", chosen):
            return None
        source = straight(self.places, taken[0])
        values = self.places.graph.values
        return source if values[source].elements == values[chosen].elements else None

    def bias(self, op: Op, chosen: int) -> int | None:
        """The bias [E, N] of which an op adds to each row that of its expert."""
        if len(op.inputs) != 2 or op.arguments.get("alpha", 1) != 1:
            return None
        taken = self.taken(op.inputs[1])
        if taken is None or taken[1] != Said("sorted", chosen):
            return None
        bias = taken[0]
        return bias if len(self.places.graph.values[bias].shape) == 2 else None


def _sorted(rows: ExpertRows, op: Op, position: int) -> Said | None:
    source = operand(op, "self").id
    values = rows.places.graph.values
    flat = len(values[source].shape) == 1 and not op.arguments.get("descending", False)
    if not flat or not values[source].dtype.startswith("int"):
        return None
    numbers = position == 1 or op.name == "aten.argsort"
    said = rows.says(source)
    if said is not None:
        return Said("back", said.chosen) if said.word == "order" and numbers else None
    return Said("order" if numbers else "sorted", straight(rows.places, source))


def _taken(rows: ExpertRows, op: Op, position: int) -> Said | None:
    index = rows.index(op)
    said = rows.says(index) if index is not None else None
    unsorted = straight(rows.places, op.inputs[0])
    if said is not None and said.word == "order" and unsorted == said.chosen:
        return Said("sorted", said.chosen)
    return None


def _token(rows: ExpertRows, op: Op, position: int) -> Said | None:
    said, count = rows.says(op.inputs[0]), op.arguments.get("other")
    floors = op.name == "aten.floor_divide" or op.arguments.get("rounding_mode") in (
        "floor",
        "trunc",
    )
    if said is None or said.word != "order" or not isinstance(count, int) or not floors:
        return None
    return Said("token", said.chosen, count)


def _put(rows: ExpertRows, op: Op, position: int) -> Said | None:
    """The numbers 0, 1, ... put where the order says."""
    index, source = rows.index(op), op.arguments.get("values", op.arguments.get("src"))
    said = rows.says(index) if index is not None else None
    if said is None or said.word != "order" or not isinstance(source, Ref):
        return None
    counting = rows.places.made_by(straight(rows.places, source.id))
    plain = counting is not None and counting.name == "aten.arange"
    plain = plain and counting.arguments.get("start", 0) == 0  # type: ignore[union-attr]
    return Said("back", said.chosen) if plain and not op.arguments.get("accumulate") else None


def _counted(rows: ExpertRows, op: Op, position: int) -> Said | None:
    values = rows.places.graph.values
    experts = values[op.outputs[0]].shape[0]
    least, most = op.arguments.get("min", 0), op.arguments.get("max", experts - 1)
    if op.name == "aten.histc" and (least, most) != (0, experts - 1):
        return None
    source = straight(rows.places, op.inputs[0])
    if not values[source].dtype.startswith("int") or len(op.inputs) != 1:
        return None
    said = rows.says(source)
    if said is not None and said.word != "sorted":
        return None
    return Said("counts", source if said is None else said.chosen)


def _clamped(rows: ExpertRows, op: Op, position: int) -> Said | None:
    """Experts that other processes have get the number of one that is here."""
    said = rows.says(op.inputs[0])
    return said if said is not None and said.word == "sorted" else None


def _others(rows: ExpertRows, op: Op, position: int) -> Said | None:
    said, experts = rows.says(op.inputs[0]), op.arguments.get("other")
    if said is None or said.word != "sorted" or not isinstance(experts, int):
        return None
    counts = [
        reader.outputs[0]
        for reader in rows.places.graph.ops
        if reader.name in ("aten.histc", "aten.bincount")
        and rows.says(reader.outputs[0]) == Said("counts", said.chosen)
    ]
    sizes = {rows.places.graph.values[value].shape[0] for value in counts}
    return Said("others", said.chosen) if sizes == {experts} else None


def _ends(rows: ExpertRows, op: Op, position: int) -> Said | None:
    said = rows.says(op.inputs[0])
    return Said("ends", said.chosen) if said is not None and said.word == "counts" else None


_TAKES = frozenset({"aten.index", "aten.index_select"})
_BY_NUMBER = frozenset({*_TAKES, "aten.index_put", "aten.scatter"})
_READERS: dict[str, Callable[[ExpertRows, Op, int], Said | None]] = {
    "aten.sort": _sorted,
    "aten.argsort": _sorted,
    "aten.index": _taken,
    "aten.index_select": _taken,
    "aten.floor_divide": _token,
    "aten.div": _token,
    "aten.index_put": _put,
    "aten.scatter": _put,
    "aten.histc": _counted,
    "aten.bincount": _counted,
    "aten.cumsum": _ends,
    "aten.clamp": _clamped,
    "aten.ge": _others,
}
"""Ops on integers, and what their results say."""
