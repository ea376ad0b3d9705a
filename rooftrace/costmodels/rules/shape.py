"""Views and bookkeeping: ops that move no bytes, whatever kind the graph gives them."""

from __future__ import annotations

from rooftrace.costmodels.costs import Cost
from rooftrace.costmodels.opviews import OpView
from rooftrace.costmodels.registry import builtin

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
