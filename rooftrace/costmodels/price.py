"""Every op of a graph, priced by its rule.  This file walks the graph and knows no op's name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rooftrace.costmodels.cost import NOTHING, Cost, OpView, Slot, TensorView, Work
from rooftrace.costmodels.registry import find_rule
from rooftrace.hardware.precision import precision, storage_bytes
from rooftrace.tracer.graph import Argument, Op, OpGraph, Ref, Tensor


def price_ops(graph: OpGraph) -> tuple[tuple[Cost, ...], tuple[bool, ...]]:
    """The cost of each op, bound to storages, and whether it has a rule.

    An op without a rule is priced at the bytes of its inputs and outputs: a lower bound of its traffic.
    Views and waits cost nothing here.  Equal ops (sizes, precisions, attributes) are priced once.
    """
    memo: dict[Any, tuple[Cost, bool]] = {}
    costs: list[Cost] = []
    known: list[bool] = []
    for op in graph.ops:
        if op.kind != "kernel":
            costs.append(NOTHING)
            known.append(True)
            continue
        key, storages = _signature(graph, op)
        found = memo.get(key)
        if found is None:
            found = memo[key] = _price(_view(key))
        costs.append(found[0].bind(storages) if found[0].traffic else found[0])
        known.append(found[1])
    return tuple(costs), tuple(known)


def view_of(graph: OpGraph, op: Op) -> OpView:
    """`op` as its rule sees it."""
    return _view(_signature(graph, op)[0])


def _price(view: OpView) -> tuple[Cost, bool]:
    found = find_rule(view.target)
    if found is None:
        return view.streamed(), False
    return _split_masked(found.price(view), view), True


def _split_masked(cost: Cost, view: OpView) -> Cost:
    """Matrix products of materialised attention compute masked pairs too: count those apart."""
    visible, pairs = view.fact("useful_pairs"), view.fact("all_pairs")
    if visible is None or pairs is None or visible == pairs:
        return cost
    work: dict[Work, int] = {}
    for key, flop in cost.work.items():
        if key.operation == "matmul" and key.count == "useful":
            useful = flop * visible // pairs
            work[key] = useful
            work[Work(key.operation, key.precision, key.rows, "masked_executed")] = flop - useful
        else:
            work[key] = flop
    return Cost(work, cost.traffic)


def _signature(graph: OpGraph, op: Op) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """What a price depends on, hashable, and the storages behind its local indices."""
    values = graph.values
    local: dict[int, int] = {}
    slots: dict[int, int] = {}
    inputs = []
    for position, index in enumerate(op.inputs):
        tensor = values[index]
        storage = local.setdefault(tensor.storage, len(local))
        slots.setdefault(index, position)
        inputs.append((tensor.shape, tensor.dtype, tensor.stride, storage))
    outputs = []
    for index in op.outputs:
        tensor = values[index]
        outputs.append((tensor.shape, tensor.dtype, tensor.stride,
                        local.setdefault(tensor.storage, len(local))))
    arguments = tuple((name, _slotted(value, slots)) for name, value in op.arguments.items())
    facts = tuple(op.facts.items()) if op.facts else ()
    return (op.target, tuple(inputs), tuple(outputs), arguments, facts), tuple(local)


def _slotted(item: Argument, slots: Mapping[int, int]) -> Any:
    if type(item) is Ref:
        return Slot(slots[item.id])
    if type(item) is tuple:
        return tuple(_slotted(x, slots) for x in item)
    return item


def _view(key: tuple[Any, ...]) -> OpView:
    target, inputs, outputs, arguments, facts = key
    return OpView(target, tuple(_tensor(*t) for t in inputs), tuple(_tensor(*t) for t in outputs),
                  arguments, facts)


@lru_cache(maxsize=65536)
def _tensor(shape: tuple[int, ...], dtype: str, stride: tuple[int, ...], storage: int) -> TensorView:
    tensor = Tensor(shape, dtype, stride, "activations", 0)
    unique = tensor.unique_elements
    return TensorView(shape, dtype, stride, storage, tensor.elements, unique, storage_bytes(dtype, unique),
                      precision(dtype).kind in ("float", "complex"))
