"""What integers say of the rows of routed experts: their order, their tokens, where experts end.

T tokens have k experts each; row t k + j is the j-th of token t.  `chosen` are the experts of all
rows, in this order.
"""

from __future__ import annotations

from rooftrace.costmodels.rewriting.matching import Pat, Pattern, Scalar, match
from rooftrace.costmodels.rewriting.places import Places

_FLAT = (None, 0, -1)
"""The dimension of a tensor that has one only."""


def taking(rows: Pattern, numbers: Pattern) -> tuple[Pat, ...]:
    """Rows that were taken by their numbers."""
    return Pat("index", rows, [numbers]), Pat("index_select", rows, 0, numbers)


ORDER = (Pat("sort", "chosen", dim=_FLAT, out=1), Pat("argsort", "chosen", dim=_FLAT))
"""The rows, sorted by expert."""
_SORTED = (Pat("sort", "chosen", dim=_FLAT), *taking("chosen", ORDER))
SORTED = (*_SORTED, Pat("clamp", _SORTED, min=Scalar("least"), max=Scalar("most")))
"""The experts in this order; those of other processes may have the number of one that is here."""
TOKEN = (
    Pat("floor_divide", ORDER, Scalar("count")),
    Pat("div", ORDER, Scalar("count"), rounding_mode=("floor", "trunc")),
)
"""The tokens of the rows in this order."""
BACK = (
    Pat("sort", ORDER, dim=_FLAT, out=1),
    Pat("argsort", ORDER, dim=_FLAT),
    Pat("index_put", "room", [ORDER], Pat("arange", start=(None, 0))),
    Pat("scatter", "room", 0, ORDER, Pat("arange", start=(None, 0))),
)
"""Where each row stands in this order."""
_COUNTS = (
    Pat("histc", (*SORTED, "chosen"), bins=Scalar("bins"), min=(None, 0), max=Scalar("last")),
    Pat("bincount", (*SORTED, "chosen"), minlength=Scalar("bins")),
)
_ENDS = Pat("cumsum", _COUNTS, dim=_FLAT, said="ends")
PRODUCT = Pat("_grouped_mm", "rows", "weight", _ENDS, said="product")
"""A product with the rows of each expert that was chosen."""
BIASED = Pat("add", PRODUCT, taking("bias", SORTED))
"""The same, and the bias [E, N] of its expert on each row."""
MASKED = Pat("masked_fill", "unmasked", Pat("ge", SORTED, Scalar("experts")), 0)
"""Rows with zeros in place of those of the experts of other processes."""


def in_order(places: Places, value: int, chosen: int) -> int | None:
    """The numbers, one for each row, that a value has in the order of the experts."""
    values = places.graph.values
    words = match(places, value, taking("numbers", ORDER), {"chosen": chosen})
    source = None if words is None else places.straight(words["numbers"])
    fits = source is not None and values[source].elements == values[chosen].elements
    return source if fits else None


def unmasked(places: Places, value: int, chosen: int, experts: int) -> int:
    """Rows before those of other processes' experts were made zero, which no product makes."""
    words = match(places, value, MASKED, {"chosen": chosen})
    masked = words is not None and words["experts"] == experts
    return places.straight(words["unmasked"] if words is not None and masked else value)


def is_choice(places: Places, chosen: int) -> bool:
    """Whether a value says for each row which expert it has."""
    tensor = places.graph.values[chosen]
    return len(tensor.shape) == 1 and tensor.dtype.startswith("int")
