"""Copies: casts, layout changes, concatenation, padding, repetition, selection.  No flop."""

from __future__ import annotations

from rooftrace.costmodels.costs import Cost
from rooftrace.costmodels.opviews import OpView
from rooftrace.costmodels.registry import builtin
from rooftrace.costmodels.rules.common import vector


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
    """The source is read, the destination written; what the destination held is not read."""
    return op.reading("src") if "_copy_from" not in op.target else op.reading("self")


@builtin("fsdp.all_gather_copy_in", kind="copy")
def into_a_part(op: OpView) -> Cost:
    """Shards read once, and written into their place in the buffer of an all-gather."""
    shards = op.operands(only=("all_gather_inputs",))
    size = sum(shard.nbytes for _, shard in shards)
    return op.read_all(shard for _, shard in shards) + op.write(op.outputs[0], size)


@builtin("fsdp.split_with_sizes_copy", "fsdp.chunk_cat", kind="copy")
def between_layouts(op: OpView) -> Cost:
    """What is gathered, or is to be scattered, read once and written in the other order."""
    source = op.operands(but=("out",))
    return op.read_all(tensor for _, tensor in source) + op.write_all(op.written())


@builtin("aten.cat", "aten.stack", fusion="pointwise", kind="copy", fused="concatenation",
         traits=("places",))
@builtin("aten.concat", "aten.concatenate", "aten.hstack", "aten.vstack",
         "aten.dstack", "aten.column_stack", "aten.block_diag", "aten._chunk_cat",
         fusion="pointwise", kind="copy")
def joined(op: OpView) -> Cost:
    """All inputs read, the whole output written."""
    return op.streamed()


@builtin("aten.constant_pad_nd", fusion="pointwise", kind="copy", traits=("places",))
@builtin("aten.repeat", "aten.tile", "aten.roll", "aten.flip",
         "aten.fliplr", "aten.flipud", "aten.rot90", "aten.tril", "aten.tril_", "aten.triu",
         "aten.triu_", "aten.diag_embed", "aten.diag", "aten.pixel_shuffle",
         "aten.pixel_unshuffle", "aten.channel_shuffle", "aten.native_channel_shuffle",
         "aten.im2col", "aten.pad", fusion="pointwise", kind="copy")
def rearranged(op: OpView) -> Cost:
    """The input read once, the output written once.

    tril and triu count the whole input, of which they need about half: a triangle does not make
    whole cache lines.
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
    """Writes zeros everywhere, then the gradient over its part: whole output and gradient."""
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
    whole, part = op.needed("self"), op.needed("src")
    survives = max(whole.nbytes - part.nbytes, 0)
    return op.read(whole, survives) + op.read(part) + op.write_all(op.outputs)


@builtin("aten._pack_padded_sequence", "aten._pad_packed_sequence",
         "aten._pack_padded_sequence_backward", "aten._jagged_to_padded_dense_forward",
         "aten._padded_dense_to_jagged_forward", "aten._nested_from_padded", kind="copy")
def packed(op: OpView) -> Cost:
    """Rows that are there are read and written."""
    smaller = min([t.nbytes for _, t in op.operands()][:1] + [t.nbytes for t in op.outputs][:1])
    first = op.inputs[0]
    rest = op.inputs[1:]
    return op.read(first, smaller) + op.read_all(rest) + op.write_all(op.outputs)
