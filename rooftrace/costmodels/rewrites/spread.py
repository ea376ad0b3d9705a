"""Work on equal numbers done once: what is repeated is computed before, not after.

A value is spread where its elements are copies of those of a smaller one: `expand`, `repeat`, and
nearest upsampling make such ones.  Ops whose rows do not mix then take the smaller value.  Of the
gradient of a spread value only its sum over the copies is read, which is taken as early.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from rooftrace.costmodels.ops import find_rule
from rooftrace.costmodels.rewrites.dataflow import (
    COPIES,
    VIEWS,
    ValueFlow,
    dense_like,
    reads_across,
)
from rooftrace.costmodels.rewrites.editing import (
    ATTENTION,
    ATTENTION_BACKWARD,
    Editor,
    operand,
    reading_others,
    released,
    without_left_behind,
)
from rooftrace.costmodels.rewrites.indexing import order_of
from rooftrace.costmodels.rewrites.waste import is_random
from rooftrace.graph import Argument, Op, OpGraph, Ref, Tensor

Dim = tuple[tuple[int, bool], ...]
"""The factors of a dimension, the outermost first: how long, and whether elements differ along
it."""
Dims = tuple[Dim, ...]
_ORDERS = frozenset({"aten.t", "aten.transpose", "aten.permute"})
_PARTS = frozenset({"aten.split", "aten.split_with_sizes", "aten.chunk", "aten.slice"})
_ROWS = frozenset({"aten.native_layer_norm", "aten._fused_rms_norm", "aten._softmax"})
"""Ops of rows, the last dimension."""


def _tidy(factors: Iterable[tuple[int, bool]]) -> Dim:
    """Without ones, and with neighbours of a kind as one."""
    done: list[tuple[int, bool]] = []
    for size, own in factors:
        if size != 1 and done and done[-1][1] == own:
            done[-1] = (done[-1][0] * size, own)
        elif size != 1:
            done.append((size, own))
    return tuple(done)


def _whole(shape: Sequence[int]) -> Dims:
    return tuple(_tidy([(size, True)]) for size in shape)


def _is_own(dim: Dim) -> bool:
    return all(own for _, own in dim)


def _small(dims: Dims) -> tuple[int, ...]:
    """The shape without copies."""
    return tuple(math.prod(size for size, own in dim if own) for dim in dims)


def _common(a: Dim, b: Dim) -> Dim:
    """A dimension along which elements differ where those of either do; one element has all."""
    if not a or not b:
        return a or b
    left, right, done = [*a], [*b], list[tuple[int, bool]]()
    while left:
        (n, x), (m, y) = left.pop(), right.pop()
        both = min(n, m)
        if max(n, m) % both:
            return ((math.prod(size for size, _ in a), True),)
        done.append((both, x or y))
        for rest, size, own in ((left, n, x), (right, m, y)):
            if size > both:
                rest.append((size // both, own))
    return _tidy(done[::-1])


def _together(rows: Sequence[Dims]) -> Dims:
    """The dims of a pointwise result."""
    rank = max(map(len, rows))
    made: Dims = ((),) * rank
    for row in rows:
        wide = ((),) * (rank - len(row)) + row
        made = tuple(_common(a, b) for a, b in zip(made, wide, strict=True))
    return made


def _regrouped(dims: Dims, shape: Sequence[int]) -> Dims | None:
    """The dims of a reshape."""
    left, made = [factor for dim in dims for factor in dim], list[Dim]()
    for size in reversed(shape):
        dim: list[tuple[int, bool]] = []
        while size > 1:
            length, own = left.pop()
            if length > size:
                left.append((length // size, own))
            if max(length, size) % min(length, size):
                return None
            dim.append((min(length, size), own))
            size //= min(length, size)
        made.append(_tidy(dim[::-1]))
    return tuple(made[::-1])


class _Copies:
    """Spread values, and gradients of which a sum is read, with their dims.

    needed: by op, the dims at which it takes its operands.
    """

    def __init__(self, graph: OpGraph) -> None:
        self.flow = ValueFlow(graph)
        self.values = graph.values
        self.spread = dict[int, Dims]()
        self.sums = dict[int, Dims]()
        self.needed = dict[int, dict[int, Dims]]()
        self.computed = set[int]()
        """Spread values that are more than copies."""
        self.has_work = False
        plain = {op.id for op in graph.ops if self._is_plain(op)}
        for op in graph.ops:
            made = self._made(op) if op.id in plain else None
            if made and any(map(_varies, made)):
                self.spread |= dict(zip(op.outputs, made, strict=True))
                self.has_work |= op.kind == "kernel" and op.part == "forward"
                if (op.kind == "kernel" and not is_copy(op)) or not self.computed.isdisjoint(
                    op.inputs
                ):
                    self.computed.update(op.outputs)
        for op in reversed(graph.ops) if self.has_work else ():
            if op.part == "backward" and op.id in plain and not {*op.outputs} & {*self.spread}:
                self._read_back(op)

    def dims(self, value: int) -> Dims:
        """The dims of a value."""
        return self.spread.get(value) or _whole(self.values[value].shape)

    def _is_plain(self, op: Op) -> bool:
        if op.part not in ("forward", "backward") or op.kind not in ("kernel", "view"):
            return False
        values = {*op.inputs, *op.outputs}
        writers = [self.flow.writers.get(self.values[v].storage, ()) for v in values]
        return (
            bool(op.inputs)
            and op.collective is None
            and not op.assumptions
            and "writes" not in op.facts
            and not reads_across(op)
            and all(self.values[v].then is None for v in values)
            and all(writer.part == "optimizer" for some in writers for writer in some)
            and self.flow.crossing.isdisjoint(self.values[v].storage for v in op.outputs)
            and not is_random(op)
        )

    def _made(self, op: Op) -> list[Dims] | None:
        """The dims of the results of an op; None where they are not known."""
        shape, first = self.values[op.outputs[0]].shape, self.dims(op.inputs[0])
        if op.part == "forward" and (made := self._source(op, first, shape)):
            return [made]
        if op.part == "backward" and self.spread.keys().isdisjoint(op.inputs):
            return None
        if op.name in _ORDERS:
            return [tuple(first[d] for d in order_of(op, len(first)))]
        if op.name in _PARTS and op.kind == "view":
            dim = op.arguments.get("dim", 0) % len(first)
            parts = [_whole(self.values[v].shape)[dim] for v in op.outputs]
            own = _is_own(first[dim])
            return [(*first[:dim], part, *first[dim + 1 :]) for part in parts] if own else None
        if op.kind == "view":
            made = _regrouped(first, shape) if op.name in VIEWS else None
            return [made] if made else None
        if op.name in ("aten.mm", "aten.addmm"):
            a, b = (self.dims(v) for v in op.inputs[-2:])
            rows = [(a[0], b[1]), *([first] if op.name == "aten.addmm" else [])]
            return [_together(rows)] if _is_own(a[1]) and _is_own(b[0]) else None
        if op.name == "aten.embedding":
            return [(*self.dims(operand(op, "indices").id), *_whole(shape[-1:]))]
        if op.name == "aten.convolution" and self._is_pointwise_window(op):
            return [(first[0], *_whole(shape[1:2]), *first[2:])] if _is_own(first[1]) else None
        if op.name in _ROWS:
            count = len(op.arguments.get("normalized_shape", (1,)))
            last = op.arguments.get("dim", -1) % len(first) == len(first) - 1
            shapes = [self.values[v].shape for v in op.outputs]
            made_each = [(*first[:-1], *_whole(s[-1:])) for s in shapes]
            return made_each if count == 1 and last and _is_own(first[-1]) else None
        rule = find_rule(op.target)
        if rule is None or rule.fusion != "pointwise" or len(op.outputs) != 1:
            return None
        made = _together([self.dims(v) for v in op.inputs])
        return [made] if len(made) == len(shape) else None

    def _source(self, op: Op, first: Dims, shape: tuple[int, ...]) -> Dims | None:
        """The dims of a value that an op of copies makes."""
        is_expand, is_repeat = op.name == "aten.expand", op.name == "aten.repeat"
        if not (is_expand or is_repeat or "upsample_nearest" in op.name):
            return None
        made = list[Dim]()
        for n, dim in zip(shape, ((),) * (len(shape) - len(first)) + first, strict=True):
            times, rest = divmod(n, math.prod(size for size, _ in dim))
            if rest:
                return None
            copies = ((times, False),)
            made.append(_tidy((*copies, *dim) if is_repeat else (*dim, *copies)))
        return tuple(made)

    def _is_pointwise_window(self, op: Op) -> bool:
        window = self.values[operand(op, "weight").id].shape[2:]
        steps, edges = op.arguments["stride"], op.arguments["padding"]
        plain = not op.arguments.get("transposed") and not any(edges)
        return plain and {*window, *steps} == {1}

    # -- gradients ---------------------------------------------------------------------------------

    def _read_back(self, op: Op) -> None:
        """What an op of backward needs of the gradients that it reads; its readers are known."""
        for value in op.outputs:
            self._settle(value)
        made = self.sums.get(op.outputs[0]) if len(op.outputs) == 1 else None
        wanted = self._wanted(op, made)
        if wanted:
            self.needed[op.id] = wanted
        else:
            self.sums = {v: d for v, d in self.sums.items() if v not in op.outputs}

    def _settle(self, value: int) -> None:
        """Take a gradient as a sum, where every reader does."""
        readers = self.flow.users[value]
        rows = [self.needed.get(user.id, {}).get(value) for user in readers]
        if rows and all(rows) and value not in self.flow.graph.outputs:
            made = _together([row for row in rows if row])
            if _varies(made):
                self.sums[value] = made

    def _wanted(self, op: Op, made: Dims | None) -> Mapping[int, Dims]:
        """By gradient that an op reads: the dims whose copies it may add up before."""
        first, shape = op.inputs[0], self.values[op.inputs[0]].shape
        if op.name == "aten.mm":
            (a, b), rows = op.inputs, made or _whole(self.values[op.outputs[0]].shape)
            left, right = self.dims(a), self.dims(b)
            if not _is_own(left[0]) or not _is_own(right[1]):
                return {}
            each = {a: (rows[0], right[0]), b: (left[1], rows[1])}
            return {v: d for v, d in each.items() if v not in self.spread and _varies(d)}
        if made is None and op.name == "aten.sum":
            over = {d % len(shape) for d in op.arguments.get("dim") or range(len(shape))}
            return {first: tuple(_tidy([(n, d not in over)]) for d, n in enumerate(shape))}
        if made is None and op.name == "aten.embedding_dense_backward":
            return {first: (*self.dims(operand(op, "indices").id), *_whole(shape[-1:]))}
        if made is None:
            return {}
        if op.name in _ORDERS:
            order = order_of(op, len(shape))
            return {first: tuple(made[order.index(d)] for d in range(len(shape)))}
        if op.kind == "view":
            back = _regrouped(made, shape) if op.name in VIEWS - {"aten.expand"} else None
            return {first: back} if back else {}
        rule = find_rule(op.target)
        makers = {v: self.flow.producer(v) for v in op.inputs if v not in self.spread}
        grads = [v for v, maker in makers.items() if maker and maker.part == "backward"]
        others = [self.dims(v) for v in op.inputs if v not in grads]
        alike = all(self.values[v].shape == self.values[op.outputs[0]].shape for v in grads)
        fits = alike and rule is not None and rule.fusion == "pointwise"
        return dict.fromkeys(grads, made) if fits and _together([made, *others]) == made else {}


def _varies(dims: Dims) -> bool:
    return not all(map(_is_own, dims))


def is_copy(op: Op) -> bool:
    """Whether a kernel does nothing but copy elements."""
    return op.name in COPIES or op.name == "aten.repeat" or "upsample_nearest" in op.name


# -- the graph -------------------------------------------------------------------------------------


def copied_late(graph: OpGraph) -> OpGraph:
    """What acts on copies acts on what is copied; the same graph where only copies are made."""
    found = _Copies(graph)
    if not found.has_work:
        return graph
    edit = _Smaller(graph, found)
    if not edit.fits:
        return graph
    return released(without_left_behind(edit.done(), graph), graph).verify()


class _Smaller(Editor):
    """A graph whose spread values, and sums of gradients, are small."""

    def __init__(self, graph: OpGraph, found: _Copies) -> None:
        super().__init__(graph)
        self.found, self.fits = found, True
        self.small = dict[int, Ref]()
        self.totals = dict[object, Ref]()
        whole = self._whole()
        for op in graph.ops:
            if found.spread.keys().isdisjoint(op.outputs):
                self._other(op)
                continue
            anew = op.kind == "kernel" and op.outputs[0] in found.computed
            if not anew and not whole.isdisjoint(op.outputs):
                self.ops.append(op)
            now = {value: self.small[value].id for value in op.inputs if value in self.small}
            self._shrunk(op, [found.spread[value] for value in op.outputs], now)
            for value in whole & {*op.outputs} if anew else ():
                self._copy(op, value)

    def _whole(self) -> set[int]:
        """Spread values that are read with all their copies."""
        spread, whole = self.found.spread, {*self.graph.outputs}
        for op in reversed(self.graph.ops):
            read = [v for v in op.inputs if v in spread]
            if spread.keys().isdisjoint(op.outputs):
                whole.update(v for v in read if not self._takes(op, v))
            elif not whole.isdisjoint(op.outputs):
                is_made = op.kind == "view" or op.outputs[0] not in self.found.computed
                whole.update(read if is_made else ())
        return whole & spread.keys()

    def _takes(self, op: Op, value: int) -> bool:
        """Whether an op takes a spread value that is small, or expanded."""
        dims, rule = self.found.spread[value], find_rule(op.target)
        if op.id in self.found.needed:
            return True
        masked = op.target in (ATTENTION, ATTENTION_BACKWARD) and operand(op, "query").id != value
        masked = masked and op.arguments.get("mask") == Ref(value)
        pointwise = rule is not None and rule.fusion == "pointwise" and not is_copy(op)
        return (masked or pointwise) and all(len(dim) < 2 for dim in dims) and not reads_across(op)

    def _shrunk(self, op: Op, dims: Sequence[Dims], now: Mapping[int, int]) -> None:
        """The small values of an op; now: small operands by those in whose place they are."""
        source = Ref(now.get(op.inputs[0], op.inputs[0]))
        of, shape, rule = self.values[source.id], _small(dims[0]), find_rule(op.target)
        copy = is_copy(op) and of.dtype == self.values[op.outputs[0]].dtype
        kept = op.name in COPIES and of.stride != Tensor.contiguous(of.shape)
        if op.name in _ORDERS:
            self.small[op.outputs[0]] = self.permuted(op, source, tuple(order_of(op, len(shape))))
        elif (op.kind == "view" and op.name not in _PARTS) or (copy and not kept):
            stride = of.stride if of.shape == shape else None
            self.small[op.outputs[0]] = self.viewed(op, source, shape, stride)
        else:
            if rule is not None and rule.fusion == "pointwise":
                self.fits &= all(self._fits(value, dims[0]) for value in op.inputs)
            outs = list[int]()
            for value, made in zip(op.outputs, dims, strict=True):
                old, shape = self.values[value], _small(made)
                if op.kind == "view":
                    outs.append(self.view(source, shape, of.stride, op.repeats))
                else:
                    step = dense_like(shape, old.stride)
                    outs.append(self.value(shape, old.dtype, old.role, op.repeats, stride=step))
            self.small |= dict(zip(op.outputs, map(Ref, outs), strict=True))
            op = reading_others(op, now)
            self.ops.append(replace(op, outputs=tuple(outs), flops_torch=None))

    def _fits(self, value: int, dims: Dims) -> bool:
        """Whether a small operand broadcasts to small dims."""
        own = self.found.sums.get(value) or self.found.dims(value)
        pairs = zip(reversed(own), reversed(dims), strict=False)
        return all(a == b or _small((a,)) == (1,) for a, b in pairs)

    def _copy(self, op: Op, value: int) -> None:
        """All copies of a small value."""
        factors = [factor for dim in self.found.spread[value] for factor in dim]
        rows = self.viewed(op, self.small[value], tuple(n if own else 1 for n, own in factors))
        shape = tuple(n for n, _ in factors)
        wide = self._expanded(op, rows, shape)
        old = self.values[value]
        made = self.made(op, "aten.clone.default", {"self": wide}, shape, old.dtype, old.role)
        self.becomes(op, value, made)

    def _expanded(self, op: Op, of: Ref, shape: tuple[int, ...]) -> Ref:
        source = self.values[of.id]
        pairs = zip(source.shape, shape, source.stride, strict=True)
        stride = tuple(step if n == size else 0 for n, size, step in pairs)
        return self.view_op(op, "aten.expand.default", of, {"size": shape}, shape, stride)

    def _total(self, op: Op, value: int, dims: Dims) -> Ref:
        """A gradient, its copies added up."""
        key = value, dims, op.repeats
        if key not in self.totals:
            factors, old = [factor for dim in dims for factor in dim], self.values[value]
            rows = self.viewed(op, Ref(value), tuple(n for n, _ in factors))
            over = tuple(d for d, (_, own) in enumerate(factors) if not own)
            how: dict[str, Argument] = {"self": rows, "dim": over}
            shape = tuple(n for n, own in factors if own)
            made = self.made(op, "aten.sum.dim_IntList", how, shape, old.dtype, old.role)
            self.totals[key] = self.viewed(op, made, _small(dims))
        return self.totals[key]

    def _other(self, op: Op) -> None:
        """An op whose results are not spread; it may take sums of gradients, and make some."""
        now, found = dict[int, int](), self.found
        needed = found.needed.get(op.id, {})
        for value in op.inputs:
            sums = found.sums.get(value)
            if value in needed:
                self.fits &= op.name == "aten.sum" or sums in (None, needed[value])
                if sums:
                    now[value] = self.small[value].id
                elif op.name != "aten.sum":
                    now[value] = self._total(op, value, needed[value]).id
            elif value in self.small and needed:
                now[value] = self.small[value].id
            elif value in self.small and value in found.spread and self._takes(op, value):
                shape = self.values[value].shape
                now[value] = self._expanded(op, self.small[value], shape).id
        if op.outputs and op.outputs[0] in found.sums:
            self._shrunk(op, [found.sums[op.outputs[0]]], now)
        else:
            self.ops.append(reading_others(op, now))
