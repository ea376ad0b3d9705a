"""Work on equal numbers done once: before it is repeated, not again in backward; layouts.

A value is spread where its elements are copies of those of a smaller one, as `expand`, `repeat` and
nearest upsampling make them.  Ops whose rows do not mix take the smaller one.  Of the gradient of a
spread value only its sum over the copies is read, which is taken as early.  Where values get
another order in memory, what is made of them lies as ATen lays it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise

from msgspec.structs import replace

from rooftrace.costmodels.ops import find_rule
from rooftrace.costmodels.rewrites.dataflow import (
    COPIES,
    IMAGES,
    ORDERS,
    RESHAPES,
    ValueFlow,
    dense_like,
    last_strides,
    place_of,
    reads_across,
    relaid,
    same_strides,
)
from rooftrace.costmodels.rewrites.editing import Editor, operand, reading_others, released
from rooftrace.costmodels.rewrites.indexing import order_of
from rooftrace.costmodels.rewrites.waste import is_plain, is_random
from rooftrace.graph import Argument, Op, OpGraph, Ref, Tensor

Dim = tuple[tuple[int, bool], ...]
"""The factors of a dimension, the outermost first: its length, and whether elements differ."""
Dims = tuple[Dim, ...]
_PARTS = frozenset({"aten.split", "aten.split_with_sizes", "aten.chunk", "aten.slice"})


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


def _varies(*dims: Dim) -> bool:
    """Whether elements differ all along these dimensions."""
    return all(own for dim in dims for _, own in dim)


def _small(dims: Dims) -> tuple[int, ...]:
    """The shape without copies."""
    return tuple(math.prod(size for size, own in dim if own) for dim in dims)


def _together(*rows: Dims) -> Dims:
    """The dims of a pointwise result: elements differ where those of any operand do."""
    rank = max(map(len, rows))
    wide = (((),) * (rank - len(row)) + row for row in rows)
    columns = ([dim for dim in column if dim] for column in zip(*wide, strict=True))
    return tuple(_tidy(_common(column)) for column in columns)


def _common(dims: Sequence[Dim]) -> Dim:
    """The factors of several dims of a size, cut where any of them is; one, where these differ."""
    ends = sorted({end for dim in dims for end in _ends(dim)})  # of factors, in elements
    if any(b % a for a, b in pairwise(ends)):
        return ((ends[-1], True),)
    steps = zip([1, *ends], ends, strict=False)
    return tuple((b // a, any(_owns(dim, a) for dim in dims)) for a, b in steps)[::-1]


def _ends(dim: Dim) -> list[int]:
    """The products of the innermost factors: of one, of two, ..."""
    return [math.prod(n for n, _ in dim[place:]) for place in range(len(dim))]


def _owns(dim: Dim, step: int) -> bool:
    """Whether elements at this distance within a factor differ."""
    return next(
        own for end, (_, own) in zip(_ends(dim)[::-1], dim[::-1], strict=True) if end > step
    )


def _regrouped(dims: Dims, shape: Sequence[int]) -> Dims | None:
    """The dims of a reshape; None where a factor would be cut."""
    left, made = [factor for dim in dims for factor in dim], list[Dim]()
    for size in reversed(shape):
        dim: list[tuple[int, bool]] = []
        while size > 1:
            length, own = left.pop()
            both = math.gcd(length, size)
            if both not in (length, size):
                return None
            left += [(length // both, own)] * (length > both)
            dim.append((both, own))
            size //= both
        made.append(_tidy(dim[::-1]))
    return tuple(made[::-1])


def is_copy(op: Op) -> bool:
    """Whether a kernel does nothing but copy elements."""
    return op.name in COPIES or op.name == "aten.repeat" or "upsample_nearest" in op.name


class _SpreadValues(ValueFlow):
    """The dims of spread values and of gradients that are read as sums; of each read, its own."""

    def __init__(self, graph: OpGraph) -> None:
        super().__init__(graph)
        self.spread, self.sums = dict[int, Dims](), dict[int, Dims]()
        self.needed = dict[int, Mapping[int, Dims]]()
        """By op of backward and gradient, the copies in it that it may take as their sum."""
        self.computed = set[int]()
        """Spread values that are more than copies."""
        plain = [op for op in graph.ops if op.inputs and op.outputs and self.is_known(op)]
        for op in plain:
            made = self._made(op)
            if made and not all(_varies(*dims) for dims in made):
                self.spread |= dict(zip(op.outputs, made, strict=True))
                if (op.kind == "kernel" and not is_copy(op)) or self.computed & {*op.inputs}:
                    self.computed.update(op.outputs)
        for op in reversed(plain) if self.spread else ():
            if op.part == "backward" and self.spread.keys().isdisjoint(op.outputs):
                self.needed[op.id] = self._needed(op)

    def is_known(self, op: Op) -> bool:
        """Whether what an op makes follows from what it reads, row by row or not."""
        values = (*op.inputs, *op.outputs)
        writers = [w.part for v in values for w in self.writers.get(self.values[v].storage, ())]
        plain = op.part in ("forward", "backward") and is_plain(self, op) and not op.assumptions
        some = all(0 not in self.values[value].shape for value in values)
        return plain and some and {*writers} <= {"optimizer"} and not is_random(op)

    def is_elementwise(self, op: Op) -> bool:
        """Whether an op makes one result element by element, of operands that broadcast."""
        rule = find_rule(op.target)
        if rule is None or rule.fusion != "pointwise" or rule.family or not op.inputs:
            return False
        shape, sizes = self.values[op.outputs[0]].shape, [self.values[v].shape for v in op.inputs]
        pairs = [pair for size in sizes for pair in zip(size[::-1], shape[::-1], strict=False)]
        alike = all(n in (1, m) for n, m in pairs) and all(len(s) <= len(shape) for s in sizes)
        known = (rule.kind is None or op.name in COPIES) and "cross" not in op.name
        return alike and known and len(op.outputs) == 1

    def is_whole(self, op: Op) -> bool:
        """Whether the operands of an elementwise op have no copies together."""
        return _varies(*_together(*map(self.dims, op.inputs)))

    def dims(self, value: int) -> Dims:
        """The dims of a value."""
        return self.spread.get(value) or _whole(self.values[value].shape)

    def _made(self, op: Op) -> list[Dims] | None:
        """The dims of the results of an op; None where they are not known."""
        shape, first = self.values[op.outputs[0]].shape, self.dims(op.inputs[0])
        made = None
        if op.part == "forward" and (op.name == "aten.expand" or is_copy(op)):
            made = self._copied(op, first, shape)
        elif self.spread.keys().isdisjoint(op.inputs):
            return None
        elif op.name in ORDERS:
            made = tuple(first[d] for d in order_of(op, len(first)))
        elif op.name in _PARTS and op.kind == "view":
            dim = op.arguments.get("dim", 0) % len(first)
            parts = [_whole(self.values[v].shape)[dim : dim + 1] for v in op.outputs]
            each = [first[:dim] + part + first[dim + 1 :] for part in parts]
            return each if _varies(first[dim]) else None
        elif op.kind == "view":
            made = _regrouped(first, shape) if op.name in RESHAPES else None
        elif op.name in ("aten.mm", "aten.addmm"):
            a, b = (self.dims(v) for v in op.inputs[-2:])
            bias = [first] if op.name == "aten.addmm" else []
            made = _together((a[0], b[1]), *bias) if _varies(a[1], b[0]) else None
        elif op.name == "aten.embedding":
            made = (*self.dims(operand(op, "indices").id), *_whole(shape[-1:]))
        elif op.name == "aten.convolution" and self._is_by_pixel(op):
            made = (first[0], *_whole(shape[1:2]), *first[2:]) if _varies(first[1]) else None
        elif self.is_elementwise(op):
            made = _together(*map(self.dims, op.inputs))
        return [made] if made and len(made) == len(shape) else None

    def _copied(self, op: Op, first: Dims, shape: tuple[int, ...]) -> Dims | None:
        """The dims of a value that an op of copies makes."""
        made = list[Dim]()
        for n, dim in zip(shape, ((),) * (len(shape) - len(first)) + first, strict=True):
            times, rest = divmod(n, math.prod(size for size, _ in dim))
            if rest:
                return None
            copies = ((times, False),)
            made.append(_tidy((*copies, *dim) if op.name == "aten.repeat" else (*dim, *copies)))
        return tuple(made)

    def _is_by_pixel(self, op: Op) -> bool:
        window = self.values[operand(op, "weight").id].shape[2:]
        edges, steps = op.arguments["padding"], op.arguments["stride"]
        return not op.arguments.get("transposed") and {*window, *steps} == {1} and not any(edges)

    def _needed(self, op: Op) -> Mapping[int, Dims]:
        """By gradient that an op of backward reads: its dims; the readers of results are known."""
        readers = [user for value in op.outputs for user in self.users[value]]
        rows = [self.needed.get(user.id, {}).get(op.outputs[0]) for user in readers]
        known = [row for row in rows if row is not None]
        away = not rows or len(known) < len(rows) or op.outputs[0] in self.graph.outputs
        made = None if away or len(op.outputs) > 1 else _together(*known)
        made = None if made is None or _varies(*made) else made
        wanted = self._wanted(op, made)
        if not self.spread.keys().isdisjoint(wanted):
            return {}
        if made and wanted:
            self.sums[op.outputs[0]] = made
        return wanted or (self._wanted(op, None) if made else {})

    def _wanted(self, op: Op, made: Dims | None) -> Mapping[int, Dims]:
        """By gradient that an op reads, its dims; made: those of the result, where it is a sum."""
        first, shape = op.inputs[0], self.values[op.inputs[0]].shape
        if op.name == "aten.mm":
            (a, b), rows = op.inputs, made or _whole(self.values[op.outputs[0]].shape)
            left, right = self.dims(a), self.dims(b)
            each = {a: (rows[0], right[0]), b: (left[1], rows[1])}
            own = _varies(left[0], right[1])
            return {
                v: d for v, d in each.items() if own and v not in self.spread and not _varies(*d)
            }
        if made is None and op.name == "aten.sum":
            over = {d % len(shape) for d in op.arguments.get("dim") or range(len(shape))}
            return {first: tuple(_tidy([(n, d not in over)]) for d, n in enumerate(shape))}
        if made is None and op.name == "aten.embedding_dense_backward":
            return {first: (*self.dims(operand(op, "indices").id), *_whole(shape[-1:]))}
        if made is None:
            return {}
        if op.kind == "view":
            order = order_of(op, len(shape)) if op.name in ORDERS else []
            back = tuple(made[order.index(d)] for d in range(len(order)))
            back = back or (op.name in RESHAPES and _regrouped(made, shape)) or ()
            return {first: back} if back else {}
        grads = list[int]()
        for value in op.inputs:
            maker = None if value in self.spread else self.producer(value)
            grads += [value] if maker is not None and maker.part == "backward" else []
        rest = [self.dims(v) for v in op.inputs if v not in grads]
        alike = all(self.values[v].shape == self.values[op.outputs[0]].shape for v in grads)
        fits = alike and self.is_elementwise(op)
        return dict.fromkeys(grads, made) if fits and _together(made, *rest) == made else {}


def copied_late(graph: OpGraph) -> OpGraph:
    """Kernels of rows take them before they are repeated; the same graph where there are none."""
    known = _SpreadValues(graph)
    if known.spread and (parts := _ByParts(known)).ops:
        known = _SpreadValues(graph := parts.mended())
    if not any(op.kind == "kernel" and known.spread.keys() & {*op.outputs} for op in graph.ops):
        return graph
    return _SmallWork(graph, known).mended()


class _SmallWork(Editor):
    """A graph whose spread values, and sums of gradients, are small; or have a small one beside."""

    def __init__(self, graph: OpGraph, known: _SpreadValues) -> None:
        super().__init__(graph)
        self.known, self.beside = known, dict[int, int]()
        self.totals = dict[object, int]()
        whole = self._whole()
        for op in graph.ops:
            made = known.spread if known.spread.keys() & {*op.outputs} else known.sums
            now = dict[int, int]()
            if made is known.spread or known.needed.get(op.id):
                now = {v: self.beside[v] for v in op.inputs if v in self.beside}
                needed = known.needed.get(op.id, {}).items() if op.name != "aten.sum" else ()
                late = {v: dims for v, dims in needed if v not in known.sums}
                now |= {v: self._total(op, v, dims) for v, dims in late.items()}
            if made.keys().isdisjoint(op.outputs):
                mask = op.arguments.get("mask")
                if isinstance(mask, Ref) and mask.id in known.spread.keys() - whole:
                    now[mask.id] = self._expanded(op, mask, graph.values[mask.id].shape).id
                self.ops.append(reading_others(op, now))
                continue
            full = whole & {*op.outputs}
            if full and not self._is_anew(op):
                self.ops.append(op)
            self._shrink(op, reading_others(op, now), made, bool(full))
            for value in full if self._is_anew(op) else ():
                self._spread(op, value)

    def _is_anew(self, op: Op) -> bool:
        """Whether all copies of what an op makes are made of the small one."""
        return op.kind == "kernel" and op.outputs[0] in self.known.computed

    def _whole(self) -> set[int]:
        """Spread values that are read with all their copies."""
        spread, whole = self.known.spread, {*self.graph.outputs}
        for op in reversed(self.graph.ops):
            read = {v for v in op.inputs if v in spread}
            if spread.keys().isdisjoint(op.outputs) and not self.known.needed.get(op.id):
                mask, alike = op.arguments.get("mask"), self.known.is_elementwise(op)
                alike = alike and not is_copy(op) and self.known.is_whole(op)
                wide = {v for v in read if alike or mask == Ref(v)}
                whole |= read - {v for v in wide if all(len(dim) < 2 for dim in spread[v])}
            elif whole & {*op.outputs} and not self._is_anew(op):
                whole |= read
        return whole & spread.keys()

    def _shrink(self, op: Op, now: Op, made: Mapping[int, Dims], is_beside: bool) -> None:
        """The small values of an op; now: the op with its small operands."""
        of, outs = self.values[now.inputs[0]] if now.inputs else None, list[int]()
        alias = op.name in RESHAPES or op.name == "aten.expand"
        assert of is not None
        alias = alias or (is_copy(op) and of.dtype == self.values[op.outputs[0]].dtype)
        for value in op.outputs:
            old, shape = self.values[value], _small(made[value])
            stride = dense_like(shape, old.stride)
            if op.name in ORDERS:
                stride = tuple(of.stride[d] for d in order_of(op, len(shape)))
            elif (op.name in _PARTS and op.kind == "view") or (alias and shape == of.shape):
                stride = of.stride
            out = len(self.values) if is_beside else value
            storage = of.storage if alias or op.kind == "view" else out
            new = replace(old, shape=shape, stride=stride, storage=storage)
            self.values[out : out + 1] = [new]
            outs.append(out)
        self.beside |= dict(zip(op.outputs, outs, strict=True)) if is_beside else {}
        if alias:
            self.reshape(op, Ref(now.inputs[0]), outs[0])
        else:
            self.ops.append(replace(now, outputs=tuple(outs), flops_torch=None))

    def _spread(self, op: Op, value: int) -> None:
        """All copies of a small value."""
        old = self.graph.values[value]
        factors = [factor for dim in self.known.spread[value] for factor in dim]
        few = self.viewed(op, Ref(self.beside[value]), tuple(n if own else 1 for n, own in factors))
        shape = tuple(n for n, _ in factors)
        wide = self._expanded(op, few, shape)
        made = self.made(op, "aten.clone.default", {"self": wide}, shape, old.dtype, old.role)
        self.becomes(op, value, made)

    def _expanded(self, op: Op, few: Ref, shape: tuple[int, ...]) -> Ref:
        of = self.values[few.id]
        steps = zip(of.stride, of.shape, shape, strict=True)
        stride = tuple(step if n == size else 0 for step, n, size in steps)
        return self.view_op(op, "aten.expand.default", few, {"size": shape}, shape, stride)

    def _total(self, op: Op, value: int, dims: Dims) -> int:
        """A gradient, its copies added up."""
        key = value, dims, op.repeats
        if key not in self.totals:
            factors, old = [factor for dim in dims for factor in dim], self.values[value]
            rows = self.viewed(op, Ref(value), tuple(n for n, _ in factors))
            over = tuple(d for d, (_, own) in enumerate(factors) if not own)
            how: dict[str, Argument] = {"self": rows, "dim": over}
            shape = tuple(n for n, own in factors if own)
            made = self.made(op, "aten.sum.dim_IntList", how, shape, old.dtype, old.role)
            self.totals[key] = self.viewed(op, made, _small(dims)).id
        return self.totals[key]


# -- products of joined rows -----------------------------------------------------------------------


def _is_parted(known: _SpreadValues, op: Op) -> bool:
    """Whether an op joins rows, some spread, for products alone.

    Their results are no wider: parts of those take as long to add up as to join.
    """
    values, shape = known.values, known.values[op.outputs[0]].shape
    if op.arguments.get("dim", 0) % len(shape) != len(shape) - 1 or op.part != "forward":
        return False
    for user, turned, value in known.row_readers(op.outputs[0]):
        out, inner = values[(user.outputs or (value,))[0]], user.part == "forward"
        fits = user.inputs[-1 - (inner or turned) :][:1] == (value,) and known.is_known(user)
        if inner and (turned or out.shape[-1] > shape[-1] or "alpha" in user.arguments):
            return False
        if not fits or user.name not in ("aten.mm", "aten.addmm")[: 1 + inner]:
            return False
    own = [values[v] for v in op.inputs if _varies(*known.dims(v)[:-1])]
    written = {values[v].storage for v in (*op.inputs, *op.outputs)} & known.writers.keys()
    fit = all(tensor.stride == Tensor.contiguous(tensor.shape) for tensor in own)
    return fit and len(own) < len(op.inputs) and not written


class _ByParts(Editor):
    """Products with joined rows [T, K] become sums of products with each part [T, k]."""

    def __init__(self, known: _SpreadValues) -> None:
        super().__init__(known.graph)
        self.known, reads, columns = known, dict[int, tuple[Op, bool]](), dict[int, Op]()
        for op in self.graph.ops:
            if op.name == "aten.cat" and _is_parted(known, op):
                reads |= {u.id: (op, turned) for u, turned, _ in known.row_readers(op.outputs[0])}
        places = {place_of(self.graph.ops[number]) for number in reads}
        for op in self.graph.ops if reads else ():
            if op.id in reads:
                self._multiply(op, *reads[op.id])
            elif op.id in columns:
                self._cut(op, columns[op.id])
            else:
                self.ops.append(op)
                if op.name == "aten.mm" and op.part == "backward" and place_of(op) in places:
                    cut = [user for user, *_ in known.row_readers(op.outputs[0])]
                    columns |= {u.id: op for u in cut if all(map(known.takes_columns, cut))}

    def _multiply(self, op: Op, join: Op, turned: bool) -> None:
        """The sum of products with each part; in backward they are parts of the result."""
        old, made, inner, end = self.values[op.outputs[0]], list[Ref](), op.part == "forward", 0
        dims = zip(*(self.known.dims(part)[:-1] for part in join.inputs), strict=True)
        cut = [n for column in dims for n, _ in _common(column)]
        for part in join.reads:
            start, end = end, end + self.values[part.id].shape[-1]
            rows, size = self.viewed(op, part, (math.prod(cut), end - start)), [*old.shape]
            if inner:
                both = rows, self.sliced(op, operand(op, "mat2"), 0, start, end)
            elif turned:
                both = self.permuted(op, rows, (1, 0)), operand(op, "mat2")
            else:
                both = operand(op, "self"), rows
            size[not turned] = size[1] if inner else end - start
            how: dict[str, Argument] = {"self": both[0], "mat2": both[1]}
            if inner and "mat1" in op.arguments and not made:
                how = {**op.arguments, "mat1": both[0], "mat2": both[1]}
            target = f"aten.{'addmm' if 'mat1' in how else 'mm'}.default"
            each = self.made(op, target, how, tuple(size), old.dtype, old.role)
            made.append(self.viewed(op, each, (*cut, size[1])) if inner else each)
        total, shape = made[0], self.values[made[0].id].shape
        for each in made[1:] if inner else ():
            terms = {"self": total, "other": each}
            total = self.made(op, "aten.add.Tensor", terms, shape, old.dtype, old.role)
        if inner:
            self.becomes(op, op.outputs[0], total)
        else:
            how = {"tensors": tuple(made), "dim": int(not turned)}
            self.emit(op, "aten.cat.default", how, op.outputs)

    def _cut(self, op: Op, product: Op) -> None:
        """The columns of a product, which an op takes, made alone."""
        (value,), place = op.outputs, self.known.location(op.outputs[0])
        old, start = self.values[value], place.offset if place else 0
        shape = old.elements // old.shape[-1], old.shape[-1]
        other = self.sliced(product, operand(product, "mat2"), 1, start, start + shape[1])
        how: dict[str, Argument] = {"self": operand(product, "self"), "mat2": other}
        made, views = self.made(product, product.target, how, shape, old.dtype, old.role), [value]
        for view in views:  # grows
            of = self.values[view]
            stride = relaid(of, old, Tensor.contiguous(old.shape)) or of.stride
            self.values[view] = replace(of, stride=stride, storage=made.id)
            users = self.known.users[view]
            views += [v for user in users if user.kind == "view" for v in user.outputs]
        self.reshape(op, made, value)


# -- layouts in memory ---------------------------------------------------------------------------


_KEEPING = ("convolution", "batch_norm", "pool2d", "pool3d", "upsample", "cat")
"""Parts of names of kernels whose results lie as their images do, beside elementwise ones.

Convolutions follow the weight, too (`cudnn_conv_suggest_memory_format` of ATen's ConvUtils.h);
`cat` asks it of all its tensors (`cat_compute_output_memory_format` of TensorShape.cpp).
"""
_CONTIGUOUS = ("group_norm", "layer_norm")
"""Parts of names of kernels of contiguous tensors; ATen copies others for them
(`input.contiguous()` of group_norm.cpp, `expect_contiguous` of layer_norm.cpp, and the gradients
of derivatives.yaml)."""
_FORMAT = "memory_format:torch.contiguous_format"


class Laid(Editor):
    """A graph in which some values have other strides, and what is made of them too, op by op.

    A view that its operand no longer allows reads a contiguous copy, as `reshape` makes one.  A
    copy for such a view, or for a kernel of contiguous tensors, goes where it is not needed.
    """

    def __init__(
        self, graph: OpGraph, strides: Mapping[int, tuple[int, ...]], gone: Collection[int] = ()
    ) -> None:
        super().__init__(graph)
        self.gone = gone
        self.instead: dict[int, int] = {}  # results of copies that go, and their operands
        self.copies: dict[tuple[int, str, str, int], int] = {}  # by value, line, module and call
        for value, stride in strides.items():
            self._set(value, stride)
        self.given = strides.keys()
        for op in graph.ops:
            if not self._is_needless(op):
                self.ops.append(op if self.given & set(op.outputs) else self._laid(op))

    def done(self) -> OpGraph:
        """The new graph."""
        self.ops = [reading_others(op, self.instead) for op in self.ops]
        return released(super().done(), self.graph).verify()

    def _set(self, value: int, stride: Sequence[int], storage: int | None = None) -> None:
        where = self.values[value].storage if storage is None else storage
        self.values[value] = replace(self.values[value], stride=tuple(stride), storage=where)

    def _is_other(self, value: int) -> bool:
        """Whether a value lies in another order now."""
        return self.values[value].stride != self.graph.values[value].stride

    def _is_last(self, value: int) -> bool:
        """Whether a value has channels last now; so has a weight of one channel."""
        stride = self.values[value].stride
        return self._is_other(value) and len(stride) in IMAGES and stride[1] == 1

    def _laid(self, op: Op) -> Op:
        """An op after what it makes is laid out; it may read copies that are made before it."""
        if any(self.graph.values[value].storage != value for value in op.outputs):
            return self._with_views(op)
        if any(part in op.name for part in _CONTIGUOUS):
            other = [value for value in op.inputs if self._is_other(value)]
            return op if reads_across(op) else self._with_copies(op, other)
        if any(part in op.name for part in _KEEPING):
            some = all if op.name == "aten.cat" else any
            if some(self._is_last(value) for value in op.inputs):
                for value in op.outputs:
                    self._set(value, last_strides(self.values[value]) or self.values[value].stride)
        elif op.kind == "view" or _is_elementwise(op):
            for value in op.outputs:
                shape = self.values[value].shape
                like = next((v for v in op.inputs if self.values[v].shape == shape), None)
                if like is not None and self._is_other(like):
                    # the first operand decides (TensorIterator)
                    self._set(value, dense_like(shape, self.values[like].stride))
        return op

    def _with_views(self, op: Op) -> Op:
        """An op whose results lie in the storages of operands."""
        if reads_across(op):
            return op
        old = self.graph.values
        sources = {old[value].storage: value for value in reversed(op.inputs)}
        for value in op.outputs:
            source = sources.get(old[value].storage)
            if source is None:
                continue
            now = self.values[source]
            stride = relaid(old[value], old[source], now.stride)
            if stride is None:
                op = self._with_copies(op, [source])
                now = self.values[op.inputs[0]]
                stride = relaid(old[value], old[source], now.stride)
            self._set(value, stride or Tensor.contiguous(old[value].shape), now.storage)
        return op

    def _with_copies(self, op: Op, of: Sequence[int]) -> Op:
        """An op that reads contiguous copies of some values; its backward reads the same ones."""
        copies = {}
        for value in of:
            key = value, op.source, op.module, op.call
            if key not in self.copies:
                role = "gradients" if op.part == "backward" else "activations"
                how: dict[str, Argument] = {"self": Ref(value), "memory_format": _FORMAT}
                tensor = self.values[value]
                clone = "aten.clone.default"
                self.copies[key] = self.made(op, clone, how, tensor.shape, tensor.dtype, role).id
            copies[value] = self.copies[key]
        return reading_others(op, copies)

    def _is_needless(self, op: Op) -> bool:
        """Whether an op is a copy whose operand serves its readers as well; then that is read."""
        asked = op.function == "clone" or op.arguments.get("memory_format") != _FORMAT
        if op.name != "aten.clone" or (asked and op.id not in self.gone) or reads_across(op):
            return False
        (made,), (source,), flow = op.outputs, op.inputs, self.flow
        copy, now = self.graph.values[made], self.values[source]
        if made in flow.escaping or flow.writers.get(made):
            return False
        fits = op.id in self.gone or same_strides(copy.shape, now.stride, copy.stride)
        if not fits and not all(
            user.kind == "view" and relaid(self.graph.values[v], copy, now.stride)
            for user in flow.users[made]
            for v in user.outputs
        ):
            return False
        self._set(made, now.stride, now.storage)
        self.moved[made] = now.storage  # of views that an edit before this one left unread, too
        self.instead[made] = self.instead.get(source, source)
        return True


def _is_elementwise(op: Op) -> bool:
    rule = find_rule(op.target)
    return rule is not None and rule.fusion == "pointwise" and "memory_format" not in op.arguments
