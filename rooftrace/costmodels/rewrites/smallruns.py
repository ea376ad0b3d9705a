"""Ops of a graph on small random numbers: a test of identity with a formula.

The function of a region does not depend on how many heads or channels there are.  So it runs with a
few of each, in fp64, where a template of ops would match one way to write it only.  Each dimension
of a value is a product of factors; a factor is as long as in the graph, or shorter.  Ops without a
handler raise NotRun: the region then stays as it is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rooftrace._amounts import np
from rooftrace.costmodels.rewrites.indexing import order_of
from rooftrace.graph import Op, OpGraph, Ref

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

Dim = tuple[tuple[int, int], ...]
"""The factors of a dimension: the length of each in the graph, and its small one.  () is 1."""
_END = 1 << 40


class NotRun(Exception):
    """An op, or a size, that cannot be run small."""


class SmallTensor:
    """Numbers in place of a value, and the factors of its dimensions."""

    __slots__ = ("array", "dims")

    def __init__(self, array: Array, dims: Sequence[Dim]) -> None:
        self.array, self.dims = array, tuple(dims)


class SmallRun:
    """Runs ops of a graph in order; `values` holds their results, by value id.

    outer: how many repeats all of the ops are in; one iteration of these is run.  sizes: small
    lengths by length in the graph, for ops with no other sign of the dimension.
    """

    def __init__(
        self, graph: OpGraph, inputs: Mapping[int, SmallTensor], outer: int,
        sizes: Mapping[int, int],
    ) -> None:  # fmt: skip
        self.graph, self.sizes, self.outer = graph, sizes, outer
        self.values = dict(inputs)
        self.like = {graph.values[i].shape: piece.dims for i, piece in inputs.items()}
        self._iteration: dict[int, tuple[int, dict[int, SmallTensor]]] = {}
        self._every: dict[int, list[SmallTensor]] = {}

    def run(self, ops: Sequence[Op]) -> dict[int, SmallTensor]:
        """All values after these ops.  Raises NotRun."""
        for op in ops:
            self._every.update((ref.id, []) for ref in op.reads if ref.every)
        try:
            with np.errstate(all="ignore"):
                self._block(ops, self.outer)
        except (ValueError, IndexError, TypeError, KeyError, np.linalg.LinAlgError) as error:
            raise NotRun(str(error)) from error
        return self.values

    def _block(self, ops: Sequence[Op], depth: int) -> None:
        for inside, together in itertools.groupby(ops, lambda op: op.repeats[depth : depth + 1]):
            if inside:
                self._loop(inside[0], list(together), depth + 1)
                continue
            for op in together:
                self._op(op)

    def _loop(self, repeat: int, body: Sequence[Op], depth: int) -> None:
        carried = [ref.then.value for op in body for ref in op.reads if ref.then is not None]
        for number in range(self.graph.repeats[repeat].count):
            before = {i: self.values[i] for i in carried if i in self.values}
            self._iteration[repeat] = number, before
            self._block(body, depth)
            for op in body:
                for i in op.outputs:
                    if i in self._every:
                        self._every[i].append(self.values[i])
        del self._iteration[repeat]

    def _op(self, op: Op) -> None:
        name = op.name.removeprefix("aten.")
        in_place = name.endswith("_")
        made = _HANDLERS.get(name.removesuffix("_"))
        if made is None:
            raise NotRun(op.name)
        result = made(self, op)
        if in_place:
            target = self.of(op, "self")
            target.array[...] = result.array
            result = target
        for i, piece in zip(
            op.outputs, [result] if isinstance(result, SmallTensor) else result, strict=True
        ):
            self.values[i] = piece
            self.like.setdefault(self.graph.values[i].shape, piece.dims)

    # -- arguments ---------------------------------------------------------------------------------

    def at(self, ref: Ref) -> SmallTensor:
        """The value of a reference in this iteration."""
        if ref.then is not None and ref.then.repeat in self._iteration:
            number, before = self._iteration[ref.then.repeat]
            if number + ref.then.shift >= 0:
                if ref.then.shift != -1:
                    raise NotRun("an iteration further back")
                return before[ref.then.value]
        return self.values[ref.id]

    def of(self, op: Op, name: str) -> SmallTensor:
        """A tensor argument; a number becomes a tensor without dimensions."""
        item = op.arguments.get(name)
        if isinstance(item, Ref):
            return self.at(item)
        if isinstance(item, (int, float)):
            return SmallTensor(np.asarray(item), ())
        raise NotRun(f"{op.name}: {name}")

    def all_of(self, op: Op, name: str) -> list[SmallTensor]:
        """The tensors in a list; those of all iterations are interleaved."""
        pieces: list[SmallTensor] = []
        group: list[Ref] = []
        for ref in (*op.arguments[name], None):
            if ref is not None and ref.every and self._every.get(ref.id):
                group.append(ref)
                continue
            for together in zip(*(self._every[r.id] for r in group), strict=True):
                pieces += together
            group = []
            if ref is not None:
                pieces.append(self.at(ref))
        return pieces

    def number(self, op: Op, name: str, default: Any = None) -> Any:
        """A plain argument in this iteration."""
        item = op.arguments.get(name, default)
        step = op.steps.get(name, 0)
        return item + step * self._iteration[op.repeats[-1]][0] if step else item

    def full(self, op: Op, position: int = 0) -> tuple[int, ...]:
        """The shape of a result in the graph."""
        return self.graph.values[op.outputs[position]].shape

    def sized(self, shape: Sequence[int]) -> tuple[Dim, ...]:
        """The dimensions of a tensor of which only the shape is known."""
        shape = tuple(shape)
        alike = self.like.get(shape)
        return alike or tuple(((n, self.sizes.get(n, n)),) if n != 1 else () for n in shape)


def short(dims: Iterable[Dim]) -> tuple[int, ...]:
    """The small shape."""
    return tuple(math.prod(small for _, small in dim) for dim in dims)


def _check_full(dim: Dim, action: str) -> None:
    """Raise NotRun where a dimension is shorter than in the graph."""
    if any(n != small for n, small in dim):
        raise NotRun(f"{action} of a short dimension")


def _spread(*pieces: SmallTensor) -> tuple[Dim, ...]:
    """The dimensions of a pointwise result."""
    rank = max(len(piece.dims) for piece in pieces)
    rows = [((),) * (rank - len(piece.dims)) + piece.dims for piece in pieces]
    return tuple(next((dim for dim in column if dim), ()) for column in zip(*rows, strict=True))


def _by_elements(function: str, *names: str) -> Callable[..., SmallTensor]:
    """A pointwise function of numpy, of these arguments."""

    def made(run: SmallRun, op: Op) -> SmallTensor:
        return _each(run, op, getattr(np, function), *names)

    return made


def _each(run: SmallRun, op: Op, function: Callable[..., Array], *names: str) -> SmallTensor:
    pieces = [run.of(op, name) for name in names]
    dims = _spread(*pieces)
    out = np.asarray(function(*(piece.array for piece in pieces)))
    if out.shape != short(dims):
        raise NotRun(f"{op.id} {op.name} {[(p.array.shape, p.dims) for p in pieces]}")
    return SmallTensor(out, dims)


def _added(sign: int) -> Callable[..., SmallTensor]:
    def made(run: SmallRun, op: Op) -> SmallTensor:
        alpha = sign * op.arguments.get("alpha", 1)
        return _each(run, op, lambda a, b: a + alpha * b, "self", "other")

    return made


def _viewed(run: SmallRun, op: Op) -> SmallTensor:
    """All elements in another shape: factors are merged, long ones are split."""
    piece = run.of(op, "self")
    left = [factor for dim in piece.dims for factor in dim][::-1]
    dims: list[Dim] = []
    for size in run.full(op):
        dim: list[tuple[int, int]] = []
        while (rest := size // math.prod(n for n, _ in dim)) > 1:
            long, small = left.pop()
            if rest % long and (long % rest or long != small):
                raise NotRun("a view that splits a short dimension")
            if rest % long:
                left.append((long // rest, long // rest))
                long = small = rest
            dim.append((long, small))
        dims.append(tuple(dim))
    return SmallTensor(piece.array.reshape(short(dims)), dims)


def _permuted(run: SmallRun, op: Op) -> SmallTensor:
    piece = run.of(op, "self")
    order = order_of(op, len(piece.dims))
    return SmallTensor(piece.array.transpose(order), [piece.dims[d] for d in order])


def _expanded(run: SmallRun, op: Op) -> SmallTensor:
    piece, shape = run.of(op, "self"), run.full(op)
    new = len(shape) - len(piece.dims)
    dims = [
        dim if dim or n == 1 else ((n, run.sizes.get(n, n)),)
        for n, dim in zip(shape, ((),) * new + piece.dims, strict=True)
    ]
    return SmallTensor(np.broadcast_to(piece.array, short(dims)), dims)


def _cut(piece: SmallTensor, dim: int, start: int, end: int, step: int = 1) -> SmallTensor:
    """A slice along a dimension, which is as long as in the graph."""
    dim %= len(piece.dims)
    long = math.prod(n for n, _ in piece.dims[dim])
    start, end, step = slice(start, end, step).indices(long)
    if (start, end, step) == (0, long, 1):
        return piece
    _check_full(piece.dims[dim], "a part")
    left = len(range(start, end, step))
    array = piece.array[(slice(None),) * dim + (slice(start, end, step),)]
    new: Dim = ((left, left),) if left != 1 else ()
    return SmallTensor(array, (*piece.dims[:dim], new, *piece.dims[dim + 1 :]))


def _sliced(run: SmallRun, op: Op) -> SmallTensor:
    start, end = run.number(op, "start"), run.number(op, "end")
    end = _END if end is None else min(end, _END)
    return _cut(run.of(op, "self"), op.arguments.get("dim", 0), start or 0, end,
                op.arguments.get("step", 1))  # fmt: skip


def _picked(piece: SmallTensor, dim: int, index: int) -> SmallTensor:
    """One element along a dimension."""
    dim %= len(piece.dims)
    row = _cut(piece, dim, index, index + 1 if index != -1 else _END)
    array = row.array[(slice(None),) * dim + (0,)]
    return SmallTensor(array, (*piece.dims[:dim], *piece.dims[dim + 1 :]))


def _selected(run: SmallRun, op: Op) -> SmallTensor:
    return _picked(run.of(op, "self"), op.arguments["dim"], run.number(op, "index"))


def _split(run: SmallRun, op: Op) -> list[SmallTensor]:
    piece, dim = run.of(op, "self"), op.arguments.get("dim", 0)
    if op.name == "aten.unbind":
        return [_picked(piece, dim, index) for index in range(len(op.outputs))]
    sizes = [run.full(op, position)[dim] for position in range(len(op.outputs))]
    ends = itertools.accumulate(sizes)
    return [_cut(piece, dim, end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _joined(run: SmallRun, op: Op) -> SmallTensor:
    pieces, shape = run.all_of(op, "tensors"), run.full(op)
    dim = op.arguments.get("dim", 0) % len(shape)
    if op.name == "aten.stack":
        array, rest = np.stack([p.array for p in pieces], dim), pieces[0].dims
        return SmallTensor(array, (*rest[:dim], ((shape[dim], len(pieces)),), *rest[dim:]))
    for piece in pieces:
        _check_full(piece.dims[dim], "a cat")
    pieces = [p for p in pieces if len(p.dims) == len(shape)]  # an empty one has no dimensions
    array = np.concatenate([p.array for p in pieces], dim)
    rest = pieces[0].dims
    return SmallTensor(array, (*rest[:dim], ((shape[dim], shape[dim]),), *rest[dim + 1 :]))


def _padded(run: SmallRun, op: Op) -> SmallTensor:
    piece, pad = run.of(op, "self"), op.arguments["pad"]
    widths, dims = [(0, 0)] * len(piece.dims), list(piece.dims)
    for position in range(len(pad) // 2):
        before, after, d = pad[2 * position], pad[2 * position + 1], -1 - position
        if before or after:
            if before < 0 or after < 0:
                raise NotRun("padding that cuts")
            _check_full(dims[d], "padding")
            size = piece.array.shape[d] + before + after
            widths[d], dims[d] = (before, after), ((size, size),)
    return SmallTensor(
        np.pad(piece.array, widths, constant_values=op.arguments.get("value", 0)), dims
    )


def _summed(
    run: SmallRun, op: Op, of: Callable[[Array], Array] = lambda array: array
) -> SmallTensor:
    piece = run.of(op, "self")
    rank = len(piece.dims)
    wanted = op.arguments.get("dim")
    wanted = range(rank) if wanted in (None, ()) else wanted
    gone = {d % rank for d in ((wanted,) if isinstance(wanted, int) else wanted)}
    keep = bool(op.arguments.get("keepdim", False))
    array = of(piece.array).sum(tuple(gone), keepdims=keep)
    dims = [() if d in gone else dim for d, dim in enumerate(piece.dims) if keep or d not in gone]
    return SmallTensor(array, dims)


def _length(run: SmallRun, op: Op) -> SmallTensor:
    if op.arguments.get("ord", 2) != 2:
        raise NotRun(op.name)
    total = _summed(run, op, lambda array: array * array)
    return SmallTensor(np.sqrt(total.array), total.dims)


def _mean(run: SmallRun, op: Op) -> SmallTensor:
    piece, total = run.of(op, "self"), _summed(run, op)
    return SmallTensor(total.array * (total.array.size / piece.array.size), total.dims)


def _running_sum(run: SmallRun, op: Op) -> SmallTensor:
    piece, dim = run.of(op, "self"), op.arguments["dim"]
    _check_full(piece.dims[dim], "a running sum")
    return SmallTensor(piece.array.cumsum(dim), piece.dims)


def _product(a: SmallTensor, b: SmallTensor) -> SmallTensor:
    if a.array.shape[:-2] != b.array.shape[:-2] or a.array.shape[-1] != b.array.shape[-2]:
        raise NotRun(f"product of {a.dims} {b.dims}")
    batch = [x if x else y for x, y in zip(a.dims[:-2], b.dims[:-2], strict=True)]
    return SmallTensor(a.array @ b.array, (*batch, a.dims[-2], b.dims[-1]))


def _baddbmm(run: SmallRun, op: Op) -> SmallTensor:
    product = _product(run.of(op, "batch1"), run.of(op, "batch2"))
    beta, alpha = op.arguments.get("beta", 1), op.arguments.get("alpha", 1)
    return SmallTensor(beta * run.of(op, "self").array + alpha * product.array, product.dims)


def _solved(run: SmallRun, op: Op) -> SmallTensor:
    a, b = run.of(op, "self"), run.of(op, "B")
    if not op.arguments.get("left", True):
        raise NotRun("solved from the right")
    system = np.triu(a.array) if op.arguments["upper"] else np.tril(a.array)
    if op.arguments.get("unitriangular", False):
        rows = np.arange(system.shape[-1])
        system = system.copy()
        system[..., rows, rows] = 1
    return SmallTensor(np.linalg.solve(system, b.array), b.dims)


def _corner(name: str) -> Callable[..., SmallTensor]:
    def made(run: SmallRun, op: Op) -> SmallTensor:
        piece = run.of(op, "self")
        _check_full(piece.dims[-2] + piece.dims[-1], "a triangle")
        return SmallTensor(
            getattr(np, name)(piece.array, op.arguments.get("diagonal", 0)), piece.dims
        )

    return made


def _created(number: float | None) -> Callable[..., SmallTensor]:
    """A tensor filled with a number, of the shape of the op's result."""

    def made(run: SmallRun, op: Op) -> SmallTensor:
        like = op.arguments.get("self") if op.name.endswith("_like") else None
        sized = isinstance(like, Ref) and like.id in run.values
        dims = run.of(op, "self").dims if sized else run.sized(run.full(op))
        fills = (op.arguments.get(name) for name in ("fill_value", "value", "s"))
        value = next((x for x in fills if x is not None), None) if number is None else number
        if not isinstance(value, (int, float)):
            raise NotRun(op.name)
        boolean = run.graph.values[op.outputs[0]].dtype == "bool"
        return SmallTensor(np.full(short(dims), value, dtype=bool if boolean else float), dims)

    return made


def _eye(run: SmallRun, op: Op) -> SmallTensor:
    shape = run.full(op)
    boolean = run.graph.values[op.outputs[0]].dtype == "bool"
    return SmallTensor(np.eye(*shape, dtype=bool if boolean else float), [((n, n),) for n in shape])


def _arange(run: SmallRun, op: Op) -> SmallTensor:
    start, end, step = (
        op.arguments.get(n, d) for n, d in (("start", 0), ("end", None), ("step", 1))
    )
    return SmallTensor(np.arange(start, end, step, dtype=float), [((n, n),) for n in run.full(op)])


def _copied(run: SmallRun, op: Op) -> SmallTensor:
    piece = run.of(op, "self")
    return SmallTensor(piece.array.copy(), piece.dims)


def _same(run: SmallRun, op: Op) -> SmallTensor:
    return run.of(op, "self")


def _written(run: SmallRun, op: Op) -> SmallTensor:
    """The source of a copy, broadcast to the shape of its target."""
    target, source = run.of(op, "self"), run.of(op, "src")
    pairs = zip(short(source.dims)[::-1], short(target.dims)[::-1], strict=False)
    if any(s not in (1, t) for s, t in pairs):
        raise NotRun(f"copy of {source.dims} into {target.dims}")
    return SmallTensor(np.broadcast_to(source.array, target.array.shape), target.dims)


_HANDLERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "flatten", "unflatten"), _viewed),
    **dict.fromkeys(("squeeze", "unsqueeze"), _viewed),
    **dict.fromkeys(("transpose", "t", "permute"), _permuted),
    **dict.fromkeys(("clone", "contiguous", "_to_copy"), _copied),
    **dict.fromkeys(("detach", "alias", "lift_fresh", "lift_fresh_copy"), _same),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unbind"), _split),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), _created(0)),
    **dict.fromkeys(("empty", "empty_like", "new_empty"), _created(0)),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _created(1)),
    **dict.fromkeys(("full", "full_like", "new_full", "scalar_tensor"), _created(None)),
    **dict.fromkeys(("stack", "cat"), _joined),
    "expand": _expanded, "slice": _sliced,
    "select": _selected, "constant_pad_nd": _padded, "sum": _summed, "cumsum": _running_sum,
    "linalg_vector_norm": _length, "mean": _mean,
    "bmm": lambda run, op: _product(run.of(op, "self"), run.of(op, "mat2")),
    "baddbmm": _baddbmm, "linalg_solve_triangular": _solved, "eye": _eye,
    "tril": _corner("tril"), "triu": _corner("triu"), "arange": _arange,
    "copy": _written, "add": _added(1), "sub": _added(-1), "fill": _created(None),
    "zero": _created(0),
    "rsub": _by_elements("subtract", "other", "self"),
    "pow": _by_elements("power", "self", "exponent"),
    "clamp_min": _by_elements("maximum", "self", "min"),
    "masked_fill": _by_elements("where", "mask", "value", "self"),
    "where": _by_elements("where", "condition", "self", "other"),
    "rsqrt": lambda run, op: _each(run, op, lambda a: 1 / np.sqrt(a), "self"),
    "sigmoid": lambda run, op: _each(run, op, lambda a: 1 / (1 + np.exp(-a)), "self"),
    "erf": lambda run, op: _each(run, op, np.vectorize(math.erf), "self"),
    **{name: _by_elements(function, "self", "other") for name, function in (
        ("mul", "multiply"), ("div", "divide"), ("lt", "less"), ("le", "less_equal"),
        ("gt", "greater"), ("ge", "greater_equal"), ("eq", "equal"),
    )},
    **{name: _by_elements(function, "self") for name, function in (
        ("neg", "negative"), ("exp", "exp"), ("log", "log"), ("sqrt", "sqrt"),
        ("reciprocal", "reciprocal"), ("tanh", "tanh"), ("logical_not", "invert"),
        ("bitwise_not", "invert"),
    )},
}  # fmt: skip
KNOWN = frozenset(f"aten.{name}{ending}" for name in _HANDLERS for ending in ("", "_"))
"""The names of the ops that can be run small."""
