"""Expected counts of what routed rows reach, on the ops that read or write by them.

The code got one draw of indices; how many experts an op touches is on average another number, and
not a whole one.  It takes the place of the draw's number where the op takes exactly the classes
that a router chose: a grouped product with one group for each class, and reads and writes of the
rows of a weight that has one row for each class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from rooftrace.tracer.ops import Call
from rooftrace.tracer.tape import META_KEY, Tape, records

_INDEXED = {
    "aten.index": (0, 1),
    "aten.index_select": (0, 2),
    "aten.embedding": (0, 1),
    "aten.index_put": (0, 1),
    "aten.index_put_": (0, 1),
    "aten._index_put_impl_": (0, 1),
    "aten._unsafe_index_put": (0, 1),
    "aten.index_add": (0, 2),
    "aten.index_add_": (0, 2),
}
"""Ops that take rows of a tensor by indices: where the two stand."""
_STEPS = 6
"""How many ops may lie between a weight and what is read of it: a cast, a view, a product of two
weights."""


def expect_counts(tape: Tape, call: Call, facts: dict[str, Any]) -> frozenset[int]:
    """Put expected counts into `facts` in place of those of the draw.

    Returns the assumptions that they rest on.
    """
    if "groups_touched" in facts:
        return _groups(tape, call, facts)
    if call.name in _INDEXED and tape.values.routed:
        return _rows(tape, call, facts)
    if call.name == "aten.embedding_dense_backward" and tape.values.routed:
        shape = (call.args[2], *call.args[0].shape[call.args[1].dim() :])
        return _written(tape, call.args[1], shape, facts)
    return records.NO_TAINT


def _groups(tape: Tape, call: Call, facts: dict[str, Any]) -> frozenset[int]:
    for tensor in call.tensors:
        if tensor.dtype == torch.int32 and tensor.dim() == 1:
            number = _choice(tape, tensor, len(tensor), facts["groups_touched"])
            if number is not None:
                facts["groups_touched"] = _distinct(tape, number)
            else:
                _share_of_groups(tape, tensor, facts)
    return records.NO_TAINT  # the draw's number rests on the same


def _share_of_groups(tape: Tape, offsets: Tensor, facts: dict[str, Any]) -> None:
    """Groups that are the part of one process among all classes: its share of what is expected.

    That is where several processes have an equal part of the classes each, and rows for those of
    the others are left out.  Classes that are likelier than others count as in the draw.
    """
    entry, mine = tape.values.known(offsets), len(offsets)
    if entry is None or not dist.is_available() or not dist.is_initialized():
        return
    made = [tape.values.assumptions[number].facts for number in entry.taint]
    choice = max((f for f in made if "policy" in f), key=_classes, default=None)
    if choice is None or choice["policy"].partition(":")[0] in ("skewed", "histogram"):
        return
    parts, rest = divmod(choice["classes"], mine)
    if rest or parts < 2 or dist.get_world_size() % parts:
        return
    for name, all_of_them in (
        ("groups_touched", choice["distinct"]),
        ("rows_routed", choice["rows"] * choice["chosen"]),
    ):
        part = all_of_them / parts
        facts[name] = int(part) if part.is_integer() else part


def _classes(facts: Mapping[str, Any]) -> int:
    return int(facts["classes"])


def _rows(tape: Tape, call: Call, facts: dict[str, Any]) -> frozenset[int]:
    source, index = (call.args[place] for place in _INDEXED[call.name])
    if call.name.startswith(("aten.index_select", "aten.index_add")) and call.args[1] != 0:
        return records.NO_TAINT
    if isinstance(index, (list, tuple)):
        if len(index) != 1:
            return records.NO_TAINT
        index = index[0]
    if not isinstance(index, Tensor) or not source.dim():
        return records.NO_TAINT
    if "uniform_over" in facts:
        return records.NO_TAINT
    if "rows_touched" not in facts or "index_add" in call.name:
        return _written(tape, index, tuple(source.shape), facts)
    number = _choice(tape, index, source.shape[0], facts["rows_touched"])
    tag = tape.tags.of(source)
    if number is None or tag is None or not _of_weights(tag.node, _STEPS):
        return records.NO_TAINT
    tape.values.routed.setdefault(number, set()).add(tuple(source.shape))
    facts["rows_touched"] = _distinct(tape, number)
    return records.NO_TAINT


def _written(
    tape: Tape, index: Tensor, shape: tuple[int, ...], facts: dict[str, Any]
) -> frozenset[int]:
    """Gradients are written to the rows of a tensor of the shape of a weight that was read so."""
    entry = tape.values.known(index)
    for number in () if entry is None else sorted(entry.taint):
        if shape in tape.values.routed.get(number, ()):
            facts["rows_touched"] = _distinct(tape, number)
            return frozenset([number])
    return records.NO_TAINT


def _choice(tape: Tape, index: Tensor, classes: int, reached: int) -> int | None:
    """The assumption on routing whose classes an index reaches, all those of the draw."""
    entry = tape.values.known(index)
    fitting = [
        number
        for number in (() if entry is None else sorted(entry.taint))
        for facts in [tape.values.assumptions[number].facts]
        if (facts.get("classes"), facts.get("drawn")) == (classes, reached)
    ]
    return fitting[0] if len(fitting) == 1 else None


def _distinct(tape: Tape, number: int) -> int | float:
    reached: float = tape.values.assumptions[number].facts["distinct"]
    return int(reached) if reached.is_integer() else reached


def _of_weights(node: fx.Node, steps: int) -> bool:
    """Whether a value is a weight, or made of weights alone."""
    entry = node.meta.get(META_KEY)
    if isinstance(entry, records.Entry):
        return entry.kind in ("parameter", "buffer")
    inputs = node.all_input_nodes
    return steps > 0 and bool(inputs) and all(_of_weights(n, steps - 1) for n in inputs)
