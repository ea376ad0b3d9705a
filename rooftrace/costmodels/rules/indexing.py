"""Reading and writing by index: embeddings, gathers, scatters.  Only the rows touched move.

Their number depends on values.  The tracer may know it (`rows_touched`, distinct rows of the
table), or that all rows are equally likely (`uniform_over` so many): then it is the expected one.
Otherwise it is the number of indices, or of rows if that is less.
"""

from __future__ import annotations

import math

from rooftrace.costmodels.ops import Cost, OpView, TensorView, builtin
from rooftrace.costmodels.rules.common import rows_reached, share, vector, whole_number_of


def _touched(op: OpView, indices: int, rows: int) -> float:
    reached = rows_reached(op, indices)
    if isinstance(reached, int):
        return min(reached, indices, rows)
    return reached  # an expected number, which is below both


def _part(tensor: TensorView, elements: float) -> int:
    """Bytes of that many elements of a tensor, at most all of it."""
    return share(tensor, elements, max(tensor.unique_elements, 1))


def _others(op: OpView, *names: str) -> Cost:
    """All operands but these, read once."""
    return op.read_all((t for _, t in op.operands(but=names)))


# -- embeddings ------------------------------------------------------------------------------------


@builtin("aten.embedding", fusion="gather", kind="gather", family="embedding", fused="embedding")
def embedding(op: OpView) -> Cost:
    """y[T, D] = table[V, D][index[T]]: distinct rows and indices read, y written."""
    table, index = op.needed("weight"), op.needed("indices")
    rows = _touched(op, index.elements, table.shape[0])
    return (op.read(table, share(table, rows, table.shape[0])) + op.read(index)
            + op.write_all(op.outputs))


@builtin("aten.embedding_dense_backward", "aten.embedding_backward", kind="gather",
         family="embedding")
def embedding_backward(op: OpView) -> Cost:
    """dW[V, D] zeroed (all of it written), then dy[T, D] added to the rows touched.

    Reads dy and indices; reads and writes the touched rows of dW once; T D adds.
    """
    grad, index = op.needed("grad_output", "grad"), op.needed("indices")
    out = op.outputs[0]
    size = share(out, _touched(op, index.elements, out.shape[0]), out.shape[0])
    return (vector(op, grad.elements) + op.read(grad) + op.read(index) + op.write(out)
            + op.read(out, size) + op.write(out, size))


@builtin("aten._embedding_bag", "aten._embedding_bag_forward_only", "aten.embedding_bag",
         kind="gather", family="embedding")
def embedding_bag(op: OpView) -> Cost:
    """y[B, D] = sum (mean, max) of the rows of a bag: (T - B) D adds, B D divisions of a mean."""
    table, index = op.needed("weight"), op.needed("indices")
    out = op.outputs[0]
    width = table.shape[1]
    mean = out.elements if op.attribute("mode", 0) == 1 else 0
    weights = index.elements * width if op.tensor("per_sample_weights") is not None else 0
    rows = _touched(op, index.elements, table.shape[0])
    return (vector(op, max(index.elements * width - out.elements, 0) + mean + weights)
            + op.read(table, share(table, rows, table.shape[0])) + _others(op, "weight")
            + op.write_all(op.outputs))


@builtin("aten._embedding_bag_backward", "aten._embedding_bag_dense_backward", kind="gather",
         family="embedding")
def embedding_bag_backward(op: OpView) -> Cost:
    """dW zeroed, then the gradient of its bag added to every row that was in it."""
    index, out = op.needed("indices"), op.outputs[0]
    size = share(out, _touched(op, index.elements, out.shape[0]), out.shape[0])
    return (vector(op, index.elements * out.shape[1]) + _others(op) + op.write(out)
            + op.read(out, size) + op.write(out, size))


@builtin("aten.embedding_renorm_", kind="gather", family="embedding")
def embedding_renorm(op: OpView) -> Cost:
    """Rows touched: norm (2 per value), scaled (1): read and written."""
    table, index = op.needed("self"), op.needed("indices")
    rows = _touched(op, index.elements, table.shape[0])
    size = share(table, rows, table.shape[0])
    return (vector(op, round(3 * rows * table.shape[1])) + op.read(table, size) + op.read(index)
            + op.write(table, size))


# -- gathers ---------------------------------------------------------------------------------------


@builtin("aten.index_select", fusion="gather", fused="gather")
def index_select(op: OpView) -> Cost:
    """y = x[.., index, ..] along `dim`: distinct rows and indices read, y written."""
    x, index = op.needed("self"), op.needed("index")
    rows = x.shape[op.attribute("dim")] if x.dim else 1
    touched = _touched(op, index.elements, rows)
    return op.read(x, share(x, touched, rows)) + op.read(index) + op.write_all(op.outputs)


def _indexed(op: OpView, x: TensorView) -> tuple[int, int]:
    """x[indices]: (rows that the indices choose from, elements of one row).

    An absent index takes all of its dimension; a boolean index covers as many dimensions as it has.
    """
    rows, dim = 1, 0
    for item in op.attribute("indices", ()):
        index = op.inputs[item.index] if item is not None else None
        covers = index.dim if index is not None and index.dtype in ("bool", "uint8") else 1
        if index is not None:
            rows *= math.prod(x.shape[dim:dim + covers])
        dim += covers
    return rows, x.elements // rows if rows else 0


@builtin("aten.index", fusion="gather", fused="gather")
@builtin("aten._unsafe_index", "aten._unsafe_masked_index", fusion="gather")
def index(op: OpView) -> Cost:
    """y = x[indices]: distinct elements chosen, the indices (or masks) read; y written."""
    x, out = op.needed("self"), op.outputs[0]
    rows, width = _indexed(op, x)
    touched = _touched(op, out.elements // width if width else 0, rows)
    return op.read(x, _part(x, touched * width)) + _others(op, "self") + op.write(out)


@builtin("aten.gather", fusion="gather", fused="gather")
@builtin("aten.take", "aten.take_along_dim", fusion="gather")
def gather(op: OpView) -> Cost:
    """y[i] = x[index[i]], one element each: as many elements read as y has, or as x has."""
    x, out = op.needed("self"), op.outputs[0]
    return (op.read(x, _part(x, whole_number_of(op, "rows_touched", out.elements)))
            + _others(op, "self") + op.write(out))


@builtin("aten.masked_select", "aten.nonzero", "aten.nonzero_static", "aten.argwhere")
def compacted(op: OpView) -> Cost:
    """The chosen elements are written, after a pass that counts and one that moves; inputs count
    once."""
    return op.streamed()


# -- scatters --------------------------------------------------------------------------------------


def _scattered(op: OpView, elements: int, touched: float, accumulate: bool,
               reached: int | None = None) -> Cost:
    """`elements` values land on `touched` distinct elements of self.

    Reads indices and values (of `src`, as many as are `reached`).  In place, only the touched
    elements are written (read as well if they accumulate, one add per value); out of place, self is
    copied first.
    """
    table, out = op.needed("self"), op.outputs[0] if op.outputs else op.needed("self")
    size = _part(table, touched)
    source = op.tensor("src") if reached is not None else None
    cost = _others(op, "self", "src" if source is not None else "self") + op.write(out, size)
    if source is not None and reached is not None:
        cost += op.read(source, _part(source, reached))
    if accumulate:
        cost += vector(op, elements) + op.read(out, size)
    if not op.target.rsplit(".", 1)[0].endswith(("_", "_index_put_impl")):
        cost += op.read(table) + op.write(out)
    return cost


@builtin("aten.index_put", "aten.index_put_", "aten._index_put_impl_", "aten._unsafe_index_put",
         "aten._unsafe_masked_index_put_accumulate", kind="gather")
def index_put(op: OpView) -> Cost:
    """x[indices] = values, or += with `accumulate`."""
    x, values = op.needed("self"), op.needed("values")
    rows, width = _indexed(op, x)
    positions = _positions(op, rows)
    touched = _touched(op, positions, rows)
    accumulate = "accumulate" in op.target or bool(op.attribute("accumulate", False))
    elements = max(positions * width, values.elements)
    return _scattered(op, elements, touched * width, accumulate)


def _positions(op: OpView, rows: int) -> int:
    """Rows that the indices name: their broadcast size; a mask may choose any number up to all."""
    shapes = [op.inputs[item.index] for item in op.attribute("indices", ()) if item is not None]
    if any(t.dtype in ("bool", "uint8") for t in shapes):
        return rows
    rank = max((t.dim for t in shapes), default=0)
    sizes = [max((t.shape[d - rank + t.dim] for t in shapes if d - rank + t.dim >= 0), default=1)
             for d in range(rank)]
    return math.prod(sizes)


@builtin("aten.index_add", "aten.index_add_", "aten.index_reduce", "aten.index_reduce_",
         "aten.index_copy", "aten.index_copy_", kind="gather")
def index_add(op: OpView) -> Cost:
    """x[.., index, ..] += alpha source along `dim` (or =, or another reduction)."""
    x, source = op.needed("self"), op.needed("source")
    rows = x.shape[op.attribute("dim")] if x.dim else 1
    width = x.elements // rows if rows else 0
    touched = _touched(op, op.needed("index").elements, rows) * width
    scaled = vector(op, source.elements) if op.attribute("alpha", 1) != 1 else Cost()
    return scaled + _scattered(op, source.elements, touched, "copy" not in op.target)


@builtin("aten.index_fill", "aten.index_fill_", kind="gather")
def index_fill(op: OpView) -> Cost:
    """x[.., index, ..] = value along `dim`."""
    x = op.needed("self")
    rows = x.shape[op.attribute("dim")] if x.dim else 1
    width = x.elements // rows if rows else 0
    touched = _touched(op, op.needed("index").elements, rows) * width
    return _scattered(op, 0, touched, False)


@builtin("aten.scatter", "aten.scatter_", "aten.scatter_add", "aten.scatter_add_",
         "aten.scatter_reduce", "aten.scatter_reduce_", kind="gather")
def scatter(op: OpView) -> Cost:
    """x[index[i]] = src[i] (or +=, or another reduction), one element each.

    The source is read where `index` reaches it: as many elements as there are indices.
    """
    x, index = op.needed("self"), op.needed("index")
    reduce = "scatter_add" in op.target or op.attribute("reduce") is not None
    touched = _touched(op, index.elements, x.elements)
    return _scattered(op, index.elements, touched, reduce, reached=index.elements)


@builtin("aten.put", "aten.put_")
def put(op: OpView) -> Cost:
    """x.flatten()[index[i]] = source[i], or +=."""
    x, index, source = op.needed("self"), op.needed("index"), op.needed("source")
    touched = _touched(op, index.elements, x.elements)
    return _scattered(op, source.elements, touched, bool(op.attribute("accumulate", False)))


@builtin("aten.masked_scatter", "aten.masked_scatter_", kind="gather")
def masked_scatter(op: OpView) -> Cost:
    """x[mask] = source, in order: x and mask read, x written, as much of source as x can take."""
    x, source = op.needed("self"), op.needed("source")
    taken = min(source.nbytes, _part(source, x.elements))
    return (op.read(x) + op.read(op.first("mask")) + op.read(source, taken)
            + op.write_all(op.outputs))


@builtin("aten.masked_scatter_backward", "aten.index_select_backward",
         "aten.value_selecting_reduction_backward", kind="gather")
def gathered_backward(op: OpView) -> Cost:
    """Zeros everywhere, then the gradient put (or added) where it was taken from."""
    out = op.outputs[0]
    grad = op.needed("grad", "grad_output")
    size = min(grad.nbytes, out.nbytes)
    adds = vector(op, grad.elements) if "index_select" in op.target else Cost()
    return adds + op.streamed() + op.write(out, size)


@builtin("aten.repeat_interleave", fusion="gather", kind="copy")
def repeat_interleave(op: OpView) -> Cost:
    """Everything read once, the repeated rows (or their indices) written."""
    return op.reading("self", "repeats")


@builtin("aten.one_hot")
def one_hot(op: OpView) -> Cost:
    """Zeros everywhere, then a one per index."""
    out, index = op.outputs[0], op.inputs[0]
    return op.read(index) + op.write(out) + op.write(out, _part(out, index.elements))
