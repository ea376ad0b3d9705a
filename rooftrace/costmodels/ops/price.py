"""Every op of a graph, priced by its rule.  This file walks the graph and knows no op's name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import compress, groupby, product
from typing import Any

from msgspec.structs import replace

from rooftrace.costmodels.fusion import runs
from rooftrace.costmodels.ops.cost import Access, Cost, Work
from rooftrace.costmodels.ops.opview import OpView, RuleError, Slot, TensorView, find_rule
from rooftrace.errors import is_ours
from rooftrace.graph import Argument, Op, OpGraph, Ref, Tensor, references, refs
from rooftrace.hardware.precisions import precision, storage_bytes

_MOST = 4096
"""Cached prices of ops: the graphs of a script, and those of other lengths, share most."""


def price_ops(
    graph: OpGraph,
    ops: Sequence[Op] | None = None,
    known: tuple[OpGraph, Sequence[Cost]] | None = None,
) -> tuple[tuple[Cost, ...], tuple[bool, ...]]:
    """The cost of each op, once, bound to storages, and whether it has a rule.  ops: else all.

    known: a graph that this one was rewritten from, and the costs of its ops, which ops of both
    keep.

    An op without a rule reads its operands and writes its results (see `without_rule`), between
    the bounds of `unknown_bytes`.  Views and waits cost nothing here.  What runs a second time in
    backward (checkpoints) counts as recompute.  Equal ops (sizes, precisions, attributes) are
    priced once.
    """
    memo: dict[Any, tuple[Cost, bool]] = {}
    costs: list[Cost] = []
    has_rule: list[bool] = []
    sizes = [(t.shape, t.dtype, t.stride, t.host) for t in graph.values]
    storages = [t.storage for t in graph.values]
    copies = _Copies(graph, sizes, storages)
    outside = {storages[i] for i in graph.external}
    places = places_in(graph, known[0]) if known else ()
    for op in graph.ops if ops is None else ops:
        if op.kind != "kernel":
            costs.append(Cost())
            has_rule.append(True)
            continue
        rule, place = find_rule(op.target), places[op.id] if places else None
        if known and place is not None and rule is not None and not rule.is_own:
            costs.append(known[1][place])
            has_rule.append(True)
            continue
        key, local = _signature(copies.written_out(op), sizes, storages)
        priced = memo.get(key)
        if priced is None:
            priced = memo[key] = _price(key, graph)
        cost = priced[0].bind(copies.owners(local)) if priced[0].traffic else priced[0]
        if rule is None:
            cost = without_rule(graph, op, cost, outside)
        costs.append(cost.recomputed() if op.part == "recompute" else cost)
        has_rule.append(priced[1])
    return tuple(costs), tuple(has_rule)


def places_in(graph: OpGraph, other: OpGraph) -> list[int | None]:
    """By op: the place of the same op in another graph of these values; None where it has none.

    It makes the same values from the same ones, with the same arguments, facts, part and repeats.
    The graphs come from each other by rewriting, so that what is equal is shared.
    """
    if graph.repeats != other.repeats:
        return [None] * len(graph.ops)
    there = {(op.target, op.outputs): op for op in other.ops}
    kept = [mine is theirs for mine, theirs in zip(graph.values, other.values, strict=False)]
    kept += [False] * (len(graph.values) - len(kept))
    kept = [same and kept[value.storage] for same, value in zip(kept, graph.values, strict=True)]

    def place(op: Op) -> int | None:
        then = there.get((op.target, op.outputs))
        if then is None or op.arguments is not then.arguments or op.facts is not then.facts:
            return None
        same = op.part == then.part and op.repeats == then.repeats
        return then.id if same and all(kept[i] for i in (*op.inputs, *op.outputs)) else None

    return [place(op) for op in graph.ops]


def op_cost(graph: OpGraph, op: Op) -> Cost:
    """The cost of one op alone, its storages by their local index; no cost of a view or a wait."""
    if op.kind != "kernel":
        return Cost()
    sizes = [(t.shape, t.dtype, t.stride, t.host) for t in graph.values]
    storages = [t.storage for t in graph.values]
    key, _ = _signature(_Copies(graph, sizes, storages).written_out(op), sizes, storages)
    return _price(key, graph)[0]


def without_rule(graph: OpGraph, op: Op, cost: Cost, outside: Collection[int]) -> Cost:
    """The assumed traffic of an op without a rule.  cost: of streaming all its operands.

    It reads its operands and writes its results in full, and reads and writes each operand that it
    changes in place.  Where such an operand outlives the step (`outside`: a cache, a buffer) and is
    larger than all others together, it only writes as many bytes as they have: a store into a large
    cache writes rows.
    """
    written = _written(graph, op)
    if not written:
        return cost
    traffic = dict(cost.traffic)
    brought = sum(
        size
        for access, size in traffic.items()
        if not access.write and access.storage not in written
    )
    for storage in written:
        read, write = Access(storage, False), Access(storage, True)
        size = traffic.get(write, traffic.get(read, 0))
        if storage in outside and 0 < brought < size:
            traffic.pop(read, None)
            size = brought
        traffic[write] = size
    return Cost(cost.work, traffic)


def unknown_bytes(graph: OpGraph, op: Op) -> tuple[int, int]:
    """Bytes that an op without a rule moves at least, and at most if it touches each byte once.

    At least: it writes its new results, and reads nothing, as it may need only the sizes of its
    operands or single rows.  An optimizer's op that changes tensors of the size of a gradient reads
    that, and reads and writes these.  At most: it reads every operand, and writes every result and
    every operand that it changes, in full.
    """
    cost = op_cost(graph, op)
    values = graph.values
    operands = {values[i].storage for i in op.inputs}
    sizes = {access: size for access, size in cost.traffic.items() if access.wire == "hbm"}
    local = list(dict.fromkeys(values[i].storage for i in (*op.inputs, *op.outputs)))
    least = sum(s for a, s in sizes.items() if a.write and local[a.storage] not in operands)
    if op.part == "optimizer":
        least += _updated(graph, op)
    counted = {local[access.storage] for access in sizes if access.write}
    more = sum(
        sizes.get(Access(local.index(storage), False), 0)
        for storage in _written(graph, op)
        if storage not in counted
    )
    return least, cost.bytes() + more


def _updated(graph: OpGraph, op: Op) -> int:
    """Bytes of gradients that an update reads, and of changed tensors of their sizes."""
    values, written = graph.values, _written(graph, op)
    operands = {values[i].storage: values[i] for i in op.inputs}
    gradients = {s: t for s, t in operands.items() if values[s].role == "gradients"}
    sizes = {tensor.elements for tensor in gradients.values()}
    changed = [
        tensor
        for storage, tensor in operands.items()
        if storage in written and storage not in gradients and tensor.elements in sizes
    ]
    if not changed:
        return 0
    return sum(t.nbytes for t in gradients.values()) + 2 * sum(t.nbytes for t in changed)


def _written(graph: OpGraph, op: Op) -> list[int]:
    """The storages of its operands that an op writes in place."""
    values = graph.values
    operands = {values[i].storage for i in op.inputs}
    storages = {values[i].storage: None for i in op.outputs if values[i].storage in operands}
    for name in op.facts.get("writes", ()):
        for ref in references({name: op.arguments.get(name)}):
            storages[values[ref.id].storage] = None
    return list(storages)


def _price(key: tuple[Any, ...], graph: OpGraph) -> tuple[Cost, bool]:
    rule = find_rule(key[0])
    if rule is not None and rule.is_own:  # it may return another cost every time
        return _priced.__wrapped__(key, rule, graph.schemas.get(key[0]))
    return _priced(key, rule)


@lru_cache(maxsize=_MOST)
def _priced(
    key: tuple[Any, ...], rule: Any, schema: tuple[str, ...] | None = None
) -> tuple[Cost, bool]:
    """The cost of an op with this signature, and whether a rule or formula gives it."""
    view = _view(key)
    flops = None if rule and rule.is_own else view.fact("flops_given")
    cost = view.streamed()
    if rule is not None:
        cost = _by_rule(lambda op: rule.cost_of(op, schema), view)
    if flops is not None:
        cost = _with_flops(cost, flops, view)
    if rule is None:
        return cost, flops is not None
    return _split_masked(cost, view), True


def _by_rule(price: Callable[[OpView], Cost], view: OpView) -> Cost:
    """The cost of an op by its rule.  Raises RuleError where the rule fails on it."""
    try:
        return price(view)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if is_ours(error):
            raise
        shapes = ", ".join(f"{t.dtype}{list(t.shape)}" for t in view.inputs)
        reason = f"{type(error).__name__}: {error}"
        raise RuleError(
            f"{view.target} of {shapes or 'nothing'}: its rule cannot price it: {reason:.300}"
        ) from error


def _with_flops(cost: Cost, flops: int, view: OpView) -> Cost:
    """The cost with `flops` in place of its work.

    flops: of a formula registered with torch's counter.  They count as the kind of work that the
    rule has most of.  Without a rule they count as a matrix product, as torch's counter counts
    these alone, in the widest precision of the inputs.
    """
    if cost.work:
        key = max(cost.work, key=lambda k: (k.operation != "vector", cost.work[k]))
    else:
        key = Work("matmul", view.precision)
    return Cost({key: flops} if flops else {}, cost.traffic)


def _split_masked(cost: Cost, view: OpView) -> Cost:
    """Masked pairs of matrix products of materialised attention counted apart."""
    visible, pairs = view.fact("useful_pairs"), view.fact("all_pairs")
    if visible is None or pairs is None or visible == pairs:
        return cost
    work: dict[Work, int] = {}
    for key, flop in cost.work.items():
        if key.operation == "matmul" and key.count == "useful":
            useful = flop * visible // pairs
            work[key] = useful
            hidden = replace(key, count="masked_executed")
            work[hidden] = flop - useful
        else:
            work[key] = flop
    return Cost(work, cost.traffic)


class _Copies:
    """Lists of all copies of a value, for ops outside of their repeat.

    Every copy gets a number after those of the values, a size and a storage.
    """

    def __init__(self, graph: OpGraph, sizes: list[tuple[Any, ...]], storages: list[int]) -> None:
        self.graph, self.sizes, self.storages = graph, sizes, storages
        self.numbers: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        self.stored: dict[tuple[int, tuple[int, ...]], int] = {}
        self.owner: dict[int, int] = {}

    def written_out(self, op: Op) -> Op:
        """The op with its lists at their full length."""
        if not self.graph.repeats:
            return op
        values = self.graph.values
        if all(values[v].repeats in ((), op.repeats) for v in (*op.inputs, *op.outputs)):
            return op
        arguments = {name: self._argument(op, item) for name, item in op.arguments.items()}
        inputs = tuple(refs(arguments))
        outputs = tuple(self._listed(op, op.outputs))
        return replace(op, arguments=arguments, inputs=inputs, outputs=outputs)

    def owners(self, local: tuple[int, ...]) -> tuple[int, ...]:
        """Storages as the graph knows them."""
        return tuple([self.owner.get(s, s) for s in local]) if self.owner else local

    def _argument(self, op: Op, item: Argument) -> Argument:
        if type(item) is not tuple:
            return item
        result: list[Argument] = []
        for every, group in groupby(item, lambda x: type(x) is Ref and x.every):
            if every:
                result += map(Ref, self._listed(op, [ref.id for ref in group]))
            else:
                result += (self._argument(op, x) for x in group)
        return tuple(result)

    def _listed(self, op: Op, values: Sequence[int]) -> Iterator[int]:
        """Copy by copy, where several values stand side by side."""
        for outside, group in groupby(values, lambda v: runs.missing(self.graph, op, v)):
            copies = [self._copies(v, outside) if outside else [v] for v in group]
            for side_by_side in zip(*copies, strict=True):
                yield from side_by_side

    def _copies(self, value: int, repeats: tuple[int, ...]) -> list[int]:
        """Numbers for the copies of a value in these repeats."""
        numbers = self.numbers.get((value, repeats))
        if numbers is None:
            numbers = self.numbers[value, repeats] = []
            storage = self.graph.values[value].storage
            copied = [r in self.graph.values[storage].repeats for r in repeats]
            for place in product(*(range(self.graph.repeats[r].count) for r in repeats)):
                numbers.append(len(self.sizes))
                self.sizes.append(self.sizes[value])
                part = tuple(compress(place, copied))
                self.storages.append(self._storage(storage, part))
        return numbers

    def _storage(self, storage: int, place: tuple[int, ...]) -> int:
        if not place:
            return storage
        copy = self.stored.setdefault((storage, place), -1 - len(self.stored))
        self.owner[copy] = storage
        return copy


def _signature(
    op: Op,
    sizes: Sequence[tuple[Any, ...]],
    storages: Sequence[int],
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """The hashable inputs of a price, and the storages of its local indices."""
    local: dict[int, int] = {}
    slots: dict[int, int] = {}
    described: list[Any] = []
    for position, index in enumerate(op.inputs):
        slots.setdefault(index, position)
        described.append(sizes[index])
        described.append(local.setdefault(storages[index], len(local)))
    for index in op.outputs:
        described.append(sizes[index])
        described.append(local.setdefault(storages[index], len(local)))
    arguments = op.arguments
    values = [
        Slot(slots[item.id])
        if type(item) is Ref
        else _slotted(item, slots)
        if type(item) is tuple
        else item
        for item in arguments.values()
    ]
    facts = tuple(op.facts.items()) if op.facts else ()
    # 1, 1.0 and True are equal as keys: their types keep them apart.
    types = tuple(map(type, values))
    return (
        op.target,
        len(op.inputs),
        tuple(described),
        tuple(arguments),
        tuple(values),
        types,
        facts,
    ), tuple(local)


def _slotted(item: Argument, slots: Mapping[int, int]) -> Any:
    if type(item) is Ref:
        return Slot(slots[item.id])
    if type(item) is tuple:
        return tuple([_slotted(x, slots) for x in item])
    return item


def _view(key: tuple[Any, ...]) -> OpView:
    target, count, described, names, values, _, facts = key
    tensors = [_tensor(*described[i], described[i + 1]) for i in range(0, len(described), 2)]
    return OpView(
        target,
        tuple(tensors[:count]),
        tuple(tensors[count:]),
        tuple(zip(names, values, strict=True)),
        facts,
    )


@lru_cache(maxsize=65536)
def _tensor(
    shape: tuple[int, ...],
    dtype: str,
    stride: tuple[int, ...],
    host: bool,
    storage: int,
) -> TensorView:
    """A tensor of these sizes; one of the host takes no bytes of the device."""
    tensor = Tensor(shape, dtype, stride, "activations", 0)
    unique = tensor.unique_elements
    floating = precision(dtype).kind in ("float", "complex")
    return TensorView(
        shape=shape,
        dtype=dtype,
        stride=stride,
        storage=storage,
        elements=tensor.elements,
        unique_elements=unique,
        nbytes=0 if host else storage_bytes(dtype, unique),
        floating=floating,
    )
