"""Rules of ops that copy, create, reshape, or select tensors, and of caches that grow in place."""

from __future__ import annotations

from rooftrace.costmodels.ops import Cost, OpView, builtin
from rooftrace.costmodels.rules.common import vector
from rooftrace.costmodels.rules.elementwise import flop_per_element

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
         "aten._foreach_zero_", fusion="pointwise")
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
