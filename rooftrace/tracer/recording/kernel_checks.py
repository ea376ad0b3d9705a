"""Checks of arguments that kernels make, but not on meta: precisions, sizes and devices that have
to agree.

The table has the ops for which a real tensor is refused that a meta one is not.  Errors are in
torch's words.  Where kernels of the CPU and of CUDA take different precisions, as for the weights
of a norm, CUDA's decide (ATen/native/cuda).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftrace.tracer.recording.by_value import is_mask
from rooftrace.tracer.recording.ops import Call
from rooftrace.tracer.values import trees

_SHORT = (torch.float16, torch.bfloat16)
_SCALAR_TYPE = "expected scalar type {0} but found {1}"


class _Agree(NamedTuple):
    """Arguments of an op that have to be in the precision of the first of them.

    words: of the first's type, the type and name of the other, and the op.
    """

    arguments: tuple[str, ...]  # as the schema names them; a list of tensors counts as all of them
    words: str = _SCALAR_TYPE
    or_fp32: bool = False  # next to a half, fp32 will do too

    def check(self, call: Call) -> None:
        """Raise RuntimeError where one does not agree."""
        first, *others = self.arguments
        tensors = _tensors(call, first)
        if not tensors:
            return
        expected = tensors[0].dtype
        wide = torch.float32 if self.or_fp32 and expected in _SHORT else expected
        for name in others:
            for tensor in _tensors(call, name):
                if tensor.dtype not in (expected, wide):
                    types = _type(wide), _type(tensor.dtype)
                    raise RuntimeError(self.words.format(*types, name, call.short_name))


class _Accept(NamedTuple):
    """An argument of an op that has to be of one of some types.

    words: of the type that it has, and the op.
    """

    argument: str
    dtypes: tuple[torch.dtype, ...]
    words: str
    kind: type[Exception] = RuntimeError

    def check(self, call: Call) -> None:
        """Raise an error of this kind where it is of another type."""
        for tensor in _tensors(call, self.argument):
            if tensor.dtype not in self.dtypes:
                raise self.kind(self.words.format(_type(tensor.dtype), call.short_name))


_PRODUCT = "expected mat1 and mat2 to have the same dtype, but got: {0} != {1}"
_SUM_OF_PRODUCT = "{2} and mat2 must have the same dtype, but got {1} and {0}"
_CONVOLUTION = "Input type ({0}) and {2} type ({1}) should be the same"
_RECURRENT = (
    "Input and {name} tensors are not the same dtype, found input tensor with {{0}} and {name} "
    "tensor with {{1}}"
)
_SCATTERED = "{3}_(): self ({0}) and source ({1}) must have the same scalar type"
_COPIED = (
    "{3}_(): self and source expected to have the same dtype, but got (self) {0} and (source) {1}"
)
_LONG, _INTS = (torch.int64,), (torch.int32, torch.int64)
_BATCH_NORM = (
    *(
        _Agree(("input", name), or_fp32=True)
        for name in ("weight", "bias", "running_mean", "running_var")
    ),
    _Agree(("weight", "bias")),
)
_ATTENTION = _Agree(
    ("query", "key", "value"), "query and {2} must have the same dtype, but got {0} and {1}"
)
_INDEX_PUT = (
    _Accept(
        "indices",
        (*_INTS, torch.bool, torch.uint8),
        "tensors used as indices must be long, int, byte or bool tensors",
        IndexError,
    ),
    _Agree(
        ("self", "values"),
        "Index put requires the source and destination dtypes match, got {0} for the destination "
        "and {1} for the source.",
    ),
)
_INDEX_ADD = (
    _Accept("index", _INTS, "{1}_(): Expected dtype int32/int64 for index but got: {0}"),
    _Agree(("self", "source"), _SCATTERED),
)
_TARGET = _Accept(
    "target",
    (torch.int64, torch.uint8),
    "expected target dtype to be Long or Byte, but got {0}",
)
_CLASS = _Accept("target", _LONG, "expected scalar type Long but found {0}")
_NORM = _Agree(("input", "weight", "bias"))
_LOSS = _Agree(("self", "target"), "Found dtype {1} but expected {0}")

_TYPES: Mapping[str, tuple[_Agree | _Accept, ...]] = {
    "aten.mm": (_Agree(("self", "mat2"), _PRODUCT),),
    "aten.mv": (_Agree(("self", "vec")),),
    "aten.addmv": (_Agree(("mat", "vec", "self")),),
    "aten.addmm": (_Agree(("mat2", "self", "mat1"), _SUM_OF_PRODUCT),),
    "aten._addmm_activation": (_Agree(("mat2", "self", "mat1"), _SUM_OF_PRODUCT),),
    "aten.addbmm": (_Agree(("batch1", "batch2", "self")),),
    "aten._grouped_mm": (_Agree(("self", "mat2"), _PRODUCT),),
    "aten.convolution": (_Agree(("input", "weight", "bias"), _CONVOLUTION),),
    "rooftrace.rnn": (
        _Agree(("input", "hx"), _RECURRENT.format(name="hidden")),
        _Agree(("input", "params"), _RECURRENT.format(name="parameter")),
    ),
    **dict.fromkeys(
        (
            "aten._scaled_dot_product_flash_attention",
            "aten._scaled_dot_product_efficient_attention",
            "aten._scaled_dot_product_cudnn_attention",
            "aten._flash_attention_forward",
            "aten._efficient_attention_forward",
            "aten._cudnn_attention_forward",
        ),
        (_ATTENTION,),
    ),
    **dict.fromkeys(("aten.native_layer_norm", "aten.native_group_norm"), (_NORM,)),
    **dict.fromkeys(
        (
            "aten.native_batch_norm",
            "aten._native_batch_norm_legit",
            "aten._native_batch_norm_legit_no_training",
            "aten._batch_norm_with_update",
            "aten._batch_norm_no_update",
        ),
        _BATCH_NORM,
    ),
    **dict.fromkeys(
        ("aten._embedding_bag", "aten._embedding_bag_forward_only"),
        (_Agree(("weight", "per_sample_weights")),),
    ),
    **dict.fromkeys(
        ("aten.nll_loss_forward", "aten.nll_loss2d_forward"),
        (_TARGET, _Agree(("self", "weight"))),
    ),
    **dict.fromkeys(("aten.multi_margin_loss", "aten.multilabel_margin_loss_forward"), (_CLASS,)),
    "aten.binary_cross_entropy": (_LOSS,),
    **dict.fromkeys(("aten.grid_sampler_2d", "aten.grid_sampler_3d"), (_Agree(("input", "grid")),)),
    "aten._cdist_forward": (_Agree(("x1", "x2")),),
    "aten.linalg_cross": (_Agree(("self", "other")),),
    "aten.complex": (_Agree(("real", "imag")),),
    "aten.polar": (_Agree(("abs", "angle")),),
    "aten.heaviside": (
        _Agree(
            ("self", "values"),
            "heaviside is not yet implemented for tensors with different dtypes.",
        ),
    ),
    **dict.fromkeys(
        ("aten.index_put", "aten._index_put_impl", "aten._unsafe_index_put"), _INDEX_PUT
    ),
    **dict.fromkeys(("aten.index_add", "aten.index_reduce"), _INDEX_ADD),
    "aten.index_copy": (
        _Accept("index", _LONG, "{1}_(): Expected a long tensor for index, but got {0}"),
        _Agree(("self", "source"), _COPIED),
    ),
    "aten.put": (
        _Accept("index", _LONG, "{1}_(): Expected a long tensor for index, but got {0}"),
        _Agree(("self", "source"), _COPIED),
    ),
    "aten.index_fill": (
        _Accept("index", _LONG, "{1}_(): Expected dtype int64 for index.", IndexError),
    ),
    "aten.index_select": (
        _Accept("index", _INTS, "{1}(): Expected dtype int32 or int64 for index"),
    ),
    "aten.masked_scatter": (
        _Accept(
            "mask",
            (torch.bool,),
            "{1}_ only supports boolean masks, but got mask with dtype {0}",
        ),
    ),
}
"""By op; one that writes in place stands under its name without the underscore."""
_ON_ONE_DEVICE = frozenset(
    {
        *_TYPES,
        *(f"aten.{name}" for name in ("bmm", "baddbmm", "dot", "cat", "stack", "embedding")),
        *(f"aten.{name}" for name in ("gather", "scatter", "scatter_add", "take")),
        "rooftrace.attention",
    }
)
"""Ops whose operands have to be on one device, besides the pointwise ones."""


def check_kernel(call: Call, device: torch.device | None) -> None:
    """Raise an error, in torch's words, for a call that a kernel refuses and meta would not.

    device: that meta tensors stand for, where host tensors are apart from it.
    """
    name = call.name.removesuffix("_")
    if device is not None and (name in _ON_ONE_DEVICE or torch.Tag.pointwise in call.func.tags):
        _check_devices(call, device)
    rules = _TYPES.get(name)
    if rules is not None and not str(call.func).endswith((".dtype", ".dtype_out")):  # of the result
        for rule in rules:
            rule.check(call)
    shapes = _SHAPES.get(name)
    if shapes is not None:
        shapes(call)


def _check_devices(call: Call, device: torch.device) -> None:
    """Operands on the host next to others: only a number, or indices, may be there."""
    kinds = {t.device.type for t in call.tensors}
    if len(kinds) < 2:
        return
    indices = [id(t) for t in _tensors(call, "indices")]
    kinds = {t.device.type for t in call.tensors if t.dim() and id(t) not in indices}
    if "cpu" in kinds and len(kinds) > 1:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{device} and cpu!"
        )


def _tensors(call: Call, name: str) -> list[Tensor]:
    """The tensors of an argument: none, one, or a list."""
    names, args = call.info.names, call.args
    place = names.index(name) if name in names else len(args)
    return trees.listed(args[place] if place < len(args) else call.kwargs.get(name))


def _type(dtype: torch.dtype) -> str:
    """The name of a precision in torch's errors: "Half"."""
    kind = torch.empty(0, dtype=dtype, device="cpu").type()
    return kind.rpartition(".")[2].removesuffix("Tensor")


_aten: Any = torch.ops.aten
_broadcast: Any = torch.broadcast_shapes


# -- sizes -----------------------------------------------------------------------------------------


def _convolution(call: Call) -> None:
    """Channels of weight[O, I / groups, ...], or [I, O / groups, ...] transposed, and bias[O]."""
    input, weight, bias, *_, transposed, _, groups = call.args
    shape, outputs = list(weight.shape), weight.shape[0]
    if outputs < groups or outputs % groups:
        size = f"at least {groups}" if outputs < groups else f"divisible by {groups}"
        raise RuntimeError(
            f"Given groups={groups}, expected weight to be {size} at dimension 0, but got weight "
            f"of size {shape} instead"
        )
    case = f"Given transposed={int(transposed)}, weight of size {shape}"
    if transposed:
        outputs = weight.shape[1] * groups
        if input.shape[1] != weight.shape[0]:
            raise RuntimeError(
                f"{case}, expected input{list(input.shape)} to have {weight.shape[0]} channels, "
                f"but got {input.shape[1]} channels instead"
            )
    if bias is not None and tuple(bias.shape) != (outputs,):
        case = case if transposed else f"Given weight of size {shape}"
        raise RuntimeError(
            f"{case}, expected bias to be 1-dimensional with {outputs} elements, but got bias of "
            f"size {list(bias.shape)} instead"
        )


def _added(call: Call) -> None:
    """The summand of self + mat1[M, K] mat2[K, N] broadcasts; else torch's error."""
    added, first, second = call.args[:3]
    if added.shape != (first.shape[0], second.shape[1]):
        added.expand(first.shape[0], second.shape[1])


def _put(call: Call) -> None:
    """The values broadcast to the indexed elements; with a mask only its values would tell."""
    target, indices, values = call.args[:3]
    if values.numel() == 1 or any(is_mask(index) for index in indices):
        return
    picked = torch.ops.aten.index.Tensor(target, indices).shape
    try:
        fits = _broadcast(values.shape, picked) == picked
    except RuntimeError:
        fits = False
    if not fits:
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to "
            f"indexing result of shape {list(picked)}"
        )


def _into(part: Any) -> Callable[[Call], None]:
    """Check that values written into a part of a tensor have that part's shape."""

    def check(call: Call) -> None:
        target, source, *where = call.args
        shape = part(target, *where, **call.kwargs).shape
        if source.shape != shape:
            raise RuntimeError(
                "expected src to have a size equal to the slice of self. src size = "
                f"{list(source.shape)}, slice size = {list(shape)}"
            )

    return check


def _labels(call: Call) -> None:
    """target[N, H, W] of input[N, C, H, W]."""
    input, target = call.args[:2]
    if (input.shape[0], *input.shape[2:]) != tuple(target.shape):
        raise RuntimeError(
            f"size mismatch (got input: {list(input.shape)} , target: {list(target.shape)}"
        )


_SHAPES: Mapping[str, Callable[[Call], None]] = {
    "aten.convolution": _convolution,
    "aten.addmm": _added,
    "aten.index_put": _put,
    "aten.slice_scatter": _into(_aten.slice.Tensor),
    "aten.select_scatter": _into(_aten.select.int),
    "aten.diagonal_scatter": _into(_aten.diagonal.default),
    "aten.nll_loss2d_forward": _labels,
}
