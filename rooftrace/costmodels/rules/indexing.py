"""Rules of ops that move data: reads and writes by index, copies, caches that grow in place.

By index only the rows touched move.  Their number depends on values.  The tracer may know it
(`rows_touched`, distinct rows of the table), or that all rows are equally likely (`uniform_over` so
many): then it is the expected one.  Otherwise it is the number of indices, or of rows if that is
less.
"""

from __future__ import annotations

import math

from rooftrace.costmodels.ops import Cost, OpView, TensorView, builtin
from rooftrace.costmodels.rules.common import rows_reached, share, vector, whole_number_of
from rooftrace.costmodels.rules.elementwise import flop_per_element


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


# -- Rules of ops that copy, create, reshape, or select tensors, and of caches that grow in place --

# -- copies ----------------------------------------------------------------------------------------
# Copies: casts, layout changes, concatenation, padding, repetition, selection.  No flop.


@builtin("aten._foreach_clone", fusion="pointwise")
@builtin("aten._to_copy", fusion="pointwise", kind="cast",
         fused="cast")
@builtin("aten.clone", "aten._lazy_clone", "aten.lift_fresh_copy", "aten.detach_copy",
         "aten.alias_copy", "aten.expand_copy", "aten.permute_copy", "aten.view_copy",
         "aten.slice_copy", "aten.select_copy", "aten.transpose_copy", "aten.t_copy",
         "aten.squeeze_copy", "aten.unsqueeze_copy", "aten.as_strided_copy", "aten.diagonal_copy",
         "aten.split_copy", "aten.split_with_sizes_copy", "aten.unbind_copy", "aten.unfold_copy",
         "aten._reshape_copy", "aten.narrow_copy", "aten.lu_unpack", "aten.frexp",
         "aten._pin_memory", "aten.pin_memory",
         fusion="pointwise", kind="copy")
def copied(op: OpView) -> Cost:
    """Distinct elements read once (an expanded input as it is stored), the copy written.

    A cast is a copy: conversion between floating types costs no flop, nor does taking one apart.
    """
    return op.streamed()


@builtin("aten._foreach_copy", "aten._foreach_copy_", fusion="pointwise")
@builtin("aten.copy_", "aten.copy", "aten._copy_from", "aten._copy_from_and_resize",
         fusion="pointwise", kind="cast")
def copy_into(op: OpView) -> Cost:
    """The source is read, the destination written and not read."""
    return op.reading("src") if "_copy_from" not in op.target else op.reading("self")


@builtin("fsdp.all_gather_copy_in", kind="copy")
def into_a_part(op: OpView) -> Cost:
    """Shards read once, and written into their place in the buffer of an all-gather."""
    shards = op.operands(only=("all_gather_inputs",))
    size = sum(shard.nbytes for _, shard in shards)
    return op.read_all(shard for _, shard in shards) + op.write(op.outputs[0], size)


@builtin("fsdp.split_with_sizes_copy", "fsdp.chunk_cat", kind="copy")
def between_layouts(op: OpView) -> Cost:
    """The gathered tensor, or the one to scatter, read once and written in the other order."""
    source = op.operands(but=("out",))
    return op.read_all(tensor for _, tensor in source) + op.write_all(op.written())


@builtin("aten.cat", "aten.stack", fusion="pointwise", kind="copy", fused="concatenation",
         traits=("places",))
@builtin("aten.concat", "aten.concatenate", "aten.hstack", "aten.vstack",
         "aten.dstack", "aten.column_stack", "aten.block_diag", "aten._chunk_cat",
         fusion="pointwise", kind="copy")
def joined(op: OpView) -> Cost:
    """All inputs read, the output written."""
    return op.streamed()


@builtin("aten.constant_pad_nd", fusion="pointwise", kind="copy", traits=("places",))
@builtin("aten.repeat", "aten.tile", "aten.roll", "aten.flip",
         "aten.fliplr", "aten.flipud", "aten.rot90", "aten.tril", "aten.tril_", "aten.triu",
         "aten.triu_", "aten.diag_embed", "aten.diag", "aten.pixel_shuffle",
         "aten.pixel_unshuffle", "aten.channel_shuffle", "aten.native_channel_shuffle",
         "aten.im2col", "aten.pad", fusion="pointwise", kind="copy")
def rearranged(op: OpView) -> Cost:
    """The input read once, the output written once.

    tril and triu count all of the input, of which they need about half: a triangle does not fill
    cache lines.
    """
    return op.streamed()


@builtin("aten.where", "aten.masked_fill", "aten.masked_fill_", fusion="pointwise")
def chosen(op: OpView) -> Cost:
    """Both sides and the condition read, the output written; choosing is no flop."""
    return op.streamed()


@builtin("aten.reflection_pad1d", "aten.reflection_pad2d", "aten.reflection_pad3d",
         "aten.replication_pad1d", "aten.replication_pad2d", "aten.replication_pad3d",
         "aten._pad_circular", fusion="gather", kind="copy")
def mirrored(op: OpView) -> Cost:
    """The input read once, the padded output written once."""
    return op.streamed()


@builtin("aten.reflection_pad1d_backward", "aten.reflection_pad2d_backward",
         "aten.reflection_pad3d_backward", "aten.replication_pad1d_backward",
         "aten.replication_pad2d_backward", "aten.replication_pad3d_backward", kind="copy")
def mirrored_backward(op: OpView) -> Cost:
    """The gradient is zeroed, and every incoming value added to the place it came from.

    Writes: zeros once, sums once.  The forward's input only says the shape.
    """
    grad, result = op.needed("grad_output"), op.written()
    return vector(op, grad.elements) + op.read(grad) + op.write_all(result) + op.write_all(result)


@builtin("aten.col2im")
def col2im(op: OpView) -> Cost:
    """Adds overlapping columns: one add per column value beyond the first of each pixel."""
    x, out = op.needed("self"), op.outputs[0]
    return vector(op, max(x.elements - out.elements, 0)) + op.streamed()


# -- gradients of views: a tensor of zeros, with the gradient copied into a part of it -------------


@builtin("aten.slice_backward", "aten.select_backward", "aten.diagonal_backward",
         fusion="pointwise")
def part_backward(op: OpView) -> Cost:
    """Writes zeros everywhere, then the gradient over its part: output and gradient in full."""
    grad, out = op.needed("grad_output"), op.outputs[0]
    size = out.nbytes // max(out.unique_elements, 1) * grad.elements
    return op.read(grad) + op.write(out) + op.write(out, size)


@builtin("aten.unfold_backward")
def unfold_backward(op: OpView) -> Cost:
    """Zeros, then every window value added to where it came from."""
    grad = op.needed("grad_in")
    return (vector(op, grad.elements) + op.read(grad) + op.write_all(op.outputs)
            + op.write_all(op.outputs))


@builtin("aten.select_scatter", "aten.slice_scatter", "aten.diagonal_scatter",
         "aten.as_strided_scatter", fusion="pointwise", kind="copy")
def part_replaced(op: OpView) -> Cost:
    """A copy of self with a part replaced: self read where it survives, src once, all written."""
    x, part = op.needed("self"), op.needed("src")
    survives = max(x.nbytes - part.nbytes, 0)
    return op.read(x, survives) + op.read(part) + op.write_all(op.outputs)


@builtin("aten._pack_padded_sequence", "aten._pad_packed_sequence",
         "aten._pack_padded_sequence_backward", "aten._jagged_to_padded_dense_forward",
         "aten._padded_dense_to_jagged_forward", "aten._nested_from_padded", kind="copy")
def packed(op: OpView) -> Cost:
    """Rows that are there are read and written."""
    smaller = min([t.nbytes for _, t in op.operands()][:1] + [t.nbytes for t in op.outputs][:1])
    first = op.inputs[0]
    rest = op.inputs[1:]
    return op.read(first, smaller) + op.read_all(rest) + op.write_all(op.outputs)


# -- creation --------------------------------------------------------------------------------------
# Tensors made from nothing: written once; `empty` writes nothing.

@builtin("aten.empty", "aten.empty_like", "aten.empty_permuted", "aten.empty_strided",
         "aten.new_empty", "aten.new_empty_strided", "aten._empty_affine_quantized",
         "aten.empty_quantized", fusion="free")
def empty(op: OpView) -> Cost:
    """An allocation: no kernel."""
    return Cost()


@builtin("aten.zeros", "aten.zeros_like", "aten.new_zeros", "aten._efficientzerotensor",
         "aten._new_zeros_with_same_feature_meta",
         "aten.ones", "aten.ones_like", "aten.new_ones", "aten.full", "aten.full_like",
         "aten.new_full", "aten.eye", "aten.scalar_tensor", "aten.tril_indices",
         "aten.triu_indices", "aten.zero", "aten.zero_", "aten._foreach_zero",
         "aten._foreach_zero_", "prims.full", "prims.full_like", "prims.fill",
         "prims.scalar_tensor", fusion="pointwise")
def filled(op: OpView) -> Cost:
    """Every element written; its old value (or the tensor it is like) is not read."""
    return op.write_all(op.written())


SERIES: dict[str, str] = {  # i: the index of the element
    "arange": "START + STEP * i", "range": "START + STEP * i", "linspace": "START + STEP * i",
    "logspace": "pow(BASE, START + STEP * i)",
    "bartlett_window": "1 - abs(i * C - 1)", "hann_window": "A - B * cos(i * C)",
    "hamming_window": "A - B * cos(i * C)",
    "blackman_window": "A - B * cos(x := i * C) + D * cos(2 * x)",
    "kaiser_window": "i0(BETA * sqrt(1 - (x := i * C - 1) * x)) / D",
}


def _series(name: str, formula: str) -> None:
    @builtin(f"aten.{name}", fusion="pointwise")
    def price(op: OpView) -> Cost:
        flop = flop_per_element(formula) * op.outputs[0].elements
        return vector(op, flop) + op.write_all(op.outputs)

    price.__doc__ = f"{formula} for every element i; of integers bytes only."


for _name, _formula in SERIES.items():
    _series(_name, _formula)


@builtin("aten.fill", "aten.fill_", "aten.fill_diagonal_", fusion="pointwise")
def fill(op: OpView) -> Cost:
    """The value read (where it is a tensor), every element written."""
    return op.reading("value")


# -- shape -----------------------------------------------------------------------------------------
# Views and bookkeeping: ops that move no bytes, whatever kind the graph gives them.

VIEWS: tuple[str, ...] = (
    "_conj", "_fw_primal", "_make_dual", "_neg_view", "_reshape_alias", "_unsafe_view", "adjoint",
    "alias", "as_strided", "as_strided_", "broadcast_to", "chunk", "conj", "detach", "detach_",
    "diagonal", "dsplit", "expand", "expand_as", "hsplit", "linalg_diagonal", "mT", "mH",
    "matrix_H", "moveaxis", "movedim", "narrow", "numpy_T", "permute", "positive", "select",
    "slice", "split", "split_with_sizes", "squeeze", "squeeze_", "swapaxes", "swapdims", "t",
    "t_", "tensor_split", "transpose", "transpose_", "unbind", "unflatten", "unfold",
    "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes", "unsqueeze", "unsqueeze_", "view",
    "view_as", "view_as_complex", "view_as_real", "vsplit", "lift", "lift_fresh", "set_",
    "resize_", "resize_as_", "requires_grad_", "_nested_view_from_buffer",
)
BOOKKEEPING: tuple[str, ...] = (
    "aten.sym_size", "aten.sym_stride", "aten.sym_numel", "aten.sym_storage_offset", "aten.size",
    "aten.numel", "aten.is_pinned", "aten.record_stream", "aten._has_compatible_shallow_copy_type",
    "aten._version", "aten.output_nr", "aten.is_same_size", "aten._cudnn_init_dropout_state",
    "aten._functional_sym_constrain_range", "aten.sym_constrain_range",
    "aten.sym_constrain_range_for_size", "aten._backward", "prim.device", "prim.layout",
    "profiler._record_function_enter_new", "profiler._record_function_exit",
    "profiler._record_function_enter",
)


@builtin(*(f"aten.{name}" for name in VIEWS), *BOOKKEEPING, fusion="free")
def free(op: OpView) -> Cost:
    """Metadata only: no kernel, no bytes."""
    return Cost()


@builtin("aten.reshape", "aten.contiguous", "aten.flatten", "aten.to", "aten.type_as", "aten.ravel",
         "aten.reshape_as", fusion="pointwise")
def view_or_copy(op: OpView) -> Cost:
    """Composites that copy when they must: free if the output shares the input's bytes."""
    if op.inputs and all(t.storage == op.inputs[0].storage for t in op.outputs):
        return Cost()
    return op.streamed()


# -- cache -----------------------------------------------------------------------------------------
# Caches that grow in place: a `cat` with a cache in compiled and efficient execution.

@builtin("rooftrace.cache_append", label="cache append")
def cache_append(op: OpView) -> Cost:
    """cache[L, D] <- new[n, D] at row L: new rows are read and written, the others stay.

    So do parts of the cache itself: in a window the new row overwrites the oldest one.
    """
    cache = op.needed("cache").storage
    new = [t for t in op.tensors("new") if t.storage != cache]
    size = sum(t.nbytes for t in new)
    return sum((op.read(t) for t in new), Cost()) + op.write(op.outputs[0], size)
