"""The kernels of eager PyTorch on CUDA, where one op launches more than one.

A meta tensor shows none of it: the kernel of an op copies an input that is not contiguous, or works
in several steps.  A compiler writes its own kernels, which read any strides, so these passes are
for executions without fusion.  They are for pricing: bytes, kernels and memory are those of the
library, and the numbers that come out need not be.

Facts are from ATen's sources (aten/src/ATen/native), named at each op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from msgspec.structs import replace

from rooftrace.costmodels.fusion import BATCH_NORMS, is_batch_norm_native, release_of
from rooftrace.costmodels.fusion.traffic import has_channels_last
from rooftrace.costmodels.ops.cost import BESIDE
from rooftrace.costmodels.rewrites.dataflow import same_strides
from rooftrace.costmodels.rewrites.editing import Editor, taking
from rooftrace.graph import Argument, Op, OpGraph, Ref, Tensor, in_order, marks
from rooftrace.hardware.precisions import storage_bytes


@dataclass(frozen=True, slots=True)
class EagerForm:
    """The kernels of some ops on CUDA.

    apply: writes them into an Editor; False, with nothing written, where there is only one.
    """

    names: Collection[str]
    apply: Callable[[Editor, Op], bool]
    noun: str  # of the note, in the singular: "12 kernels read a copy in order ..."
    verb: str
    rest: str


def with_form(form: EagerForm, mixed: bool, graph: OpGraph) -> tuple[OpGraph, int]:
    """The graph with the kernels of this form, and how often they run.

    mixed: only ops between compiled graphs have them.
    """
    if not any(op.name in form.names for op in graph.ops):
        return graph, 0
    edit, count = Editor(graph), 0
    eager = marks.eager_ops(graph.ops) if mixed else range(len(graph.ops))
    outputs = {graph.values[i].storage for i in graph.outputs}
    for op in graph.ops:
        first = len(edit.ops)
        applies = op.id in eager and op.kind == "kernel" and op.name in form.names
        if applies and form.apply(edit, op):
            edit.ops[-1] = _holding(edit, edit.ops[first:], outputs)
            count += graph.times(op)
        else:
            edit.ops.append(op)
    return (edit.done(), count) if count else (graph, 0)


def _holding(edit: Editor, kernels: Sequence[Op], outputs: Collection[int]) -> Op:
    """The last kernel of an op, which holds the operands and results of the others.

    outputs: storages of the outputs of the graph, which live anyhow.
    """
    *others, last = kernels
    alive = {edit.values[i].storage for i in (*last.inputs, *last.outputs)}.union(outputs)
    held = (ref for op in others for ref in (*op.reads, *map(Ref, op.outputs)))
    held = (ref for ref in held if edit.values[ref.id].storage not in alive)
    return replace(last, holds=in_order((*last.holds, *held)))


def _extra(edit: Editor, op: Op, target: str, arguments: Mapping[str, Argument], out: int) -> None:
    """A kernel besides that of the op itself."""
    edit.emit(op, target, arguments, (out,), facts={BESIDE: op.name})


def _temporary(
    edit: Editor, op: Op, target: str, arguments: Mapping[str, Argument], shape: tuple[int, ...],
    dtype: str, stride: tuple[int, ...] | None = None,
) -> Ref:  # fmt: skip
    """The temporary that an extra kernel makes."""
    out = edit.value(shape, dtype, "temporary", op.repeats, stride=stride)
    _extra(edit, op, target, arguments, out)
    return Ref(out)


# -- copies in order -------------------------------------------------------------------------------

_ANY_ORDER = {
    # cuda/layer_norm_kernel.cu: `expect_contiguous` of the input, and of its gradient.
    "aten.native_layer_norm": ("input",),
    "aten.native_layer_norm_backward": ("grad_out", "input"),
    "rooftrace.rms_norm": ("input",),
    "rooftrace.rms_norm_backward": ("grad_out", "input"),
    # cuda/SoftMax.cu: host_softmax and host_softmax_backward.
    "aten._softmax": ("self",),
    "aten._log_softmax": ("self",),
    "aten._softmax_backward_data": ("output",),
    "aten._log_softmax_backward_data": ("grad_output", "output"),
    # cuda/ScanUtils.cuh: scan_dim and scan_dim_with_indices.
    "aten.cumsum": ("self",),
    "aten.cumprod": ("self",),
    "aten.cummax": ("self",),
    "aten.cummin": ("self",),
    "aten.logcumsumexp": ("self",),
    # cuda/TensorTransformations.cu: roll_cuda.  cuda/TensorTopK.cpp: topk_out_with_sort.
    "aten.roll": ("self",),
    "aten.topk": ("self",),
}
"""Operands that must be contiguous, by op."""
_IMAGES = {
    # Convolution.cpp: `input.contiguous(backend_memory_format)`, and the gradient's.
    "aten.convolution": ("input",),
    "aten.convolution_backward": ("grad_output", "input"),
    # cuda/DilatedMaxPool2d.cu, AveragePool2d.cu, AdaptiveAveragePooling.cu.
    "aten.max_pool2d_with_indices": ("self",),
    "aten.avg_pool2d": ("self",),
    "aten._adaptive_avg_pool2d": ("self",),
    # cuda/UpSampleBilinear2d.cu, UpSampleNearest2d.cu.
    "aten.upsample_bilinear2d": ("input", "self"),
    "aten.upsample_nearest2d": ("input", "self"),
}
"""Operands that must be contiguous, with channels first or last."""


def _copied_in_order(edit: Editor, op: Op) -> bool:
    """Copies of operands that the kernel reads contiguous only."""
    strict = op.name in _ANY_ORDER
    fits = is_in_order if strict else _in_either_order
    names = _ANY_ORDER[op.name] if strict else _IMAGES[op.name]
    copies: dict[str, Argument] = {}
    for name in names:
        item = op.arguments.get(name)
        if isinstance(item, Ref) and not fits(edit.values[item.id]):
            value = edit.values[item.id]
            clone = {"self": item, "memory_format": "memory_format:torch.contiguous_format"}
            copies[name] = _temporary(
                edit, op, "aten.clone.default", clone, value.shape, value.dtype
            )
    if not copies:
        return False
    edit.ops.append(taking(op, {**op.arguments, **copies}))
    return True


def is_in_order(value: Tensor) -> bool:
    """Whether a tensor is contiguous."""
    if not value.elements:
        return True
    return same_strides(value.shape, value.stride, Tensor.contiguous(value.shape))


def _in_either_order(value: Tensor) -> bool:
    """Whether an image is contiguous with its channels first, or last."""
    if is_in_order(value) or not value.elements:
        return True
    if not has_channels_last(value):
        return False
    n, channels, *space = value.shape
    last = Tensor.contiguous((n, *space, channels))
    return same_strides(value.shape, value.stride, (last[0], last[-1], *last[1:-1]))


# -- another precision first -------------------------------------------------------------------

_SUMS = frozenset({"aten.sum", "aten.nansum", "aten.prod", "aten.mean", "aten.linalg_vector_norm"})
_SCANS = frozenset({"aten.cumsum", "aten.cumprod"})
_HALVES = ("fp16", "bf16")


def _cast_first(edit: Editor, op: Op) -> bool:
    """A copy in the precision of the result.

    ReduceOpsUtils.h, make_reduction_from_ty: `self.to(in_dtype)`, where in_dtype is that of the
    result unless a half is summed to fp32.  ReduceOps.cpp, impl_func_cum_ops: scans always.
    """
    item = op.arguments.get("self")
    if not isinstance(item, Ref):
        return False
    value, dtype = edit.values[item.id], edit.values[op.outputs[0]].dtype
    fused = op.name in _SUMS and value.dtype in _HALVES and dtype == "fp32"
    if value.dtype == dtype or fused or value.dtype.startswith("complex"):
        return False
    dense = value.nbytes == storage_bytes(value.dtype, value.elements)
    stride = value.stride if dense else None
    cast = {"self": item, "dtype": f"dtype:{dtype}"}
    copy = _temporary(edit, op, "aten._to_copy.default", cast, value.shape, dtype, stride)
    edit.ops.append(taking(op, {**op.arguments, "self": copy}))
    return True


# -- several kernels for one op --------------------------------------------------------------------


def _rolled(edit: Editor, op: Op) -> bool:
    """cuda/TensorTransformations.cu, roll_common: one dimension after the other."""
    item, shifts, dims = (op.arguments.get(name) for name in ("self", "shifts", "dims"))
    if not isinstance(item, Ref) or not isinstance(dims, tuple) or len(dims) < 2:
        return False
    if not isinstance(shifts, tuple) or len(shifts) != len(dims):
        return False
    value = edit.values[op.outputs[0]]
    for shift, dim in zip(shifts[:-1], dims[:-1], strict=True):
        roll = {"self": item, "shifts": (shift,), "dims": (dim,)}
        item = _temporary(edit, op, "aten.roll.default", roll, value.shape, value.dtype)
    edit.ops.append(taking(op, {"self": item, "shifts": shifts[-1:], "dims": dims[-1:]}))
    return True


def _biased(edit: Editor, op: Op) -> bool:
    """Convolution.cpp: cuDNN's result, then `add_` of the bias.

    The kernel that ATen has for depthwise convolutions with channels first adds it itself.
    """
    bias, weight = op.arguments.get("bias"), op.arguments.get("weight")
    x = op.arguments.get("input")
    if not (isinstance(bias, Ref) and isinstance(weight, Ref) and isinstance(x, Ref)):
        return False
    image, filters = edit.values[x.id], edit.values[weight.id]
    depthwise = op.arguments.get("groups", 1) > 1 and filters.shape[1] == 1
    if depthwise and not has_channels_last(image):
        return False
    out = op.outputs[0]
    value = edit.values[out]
    plain = edit.view(Ref(out), value.shape, value.stride, op.repeats)
    rest = {name: item for name, item in op.arguments.items() if name != "bias"}
    edit.ops.append(taking(op, rest, outputs=(plain,), flops_torch=None))
    wide = (-1, *(1 for _ in value.shape[2:]))
    channels = edit.values[bias.id].elements
    column = edit.viewed(op, bias, (channels, *wide[1:]))
    _extra(edit, op, "aten.add_.Tensor", {"self": Ref(plain), "other": column}, out)
    return True


def _linear(edit: Editor, op: Op) -> bool:
    """Linear.cpp before 2.1: of inputs with many dimensions, `matmul` and `add_` of the bias."""
    release, out = release_of(edit.graph), op.outputs[0]
    bias, rows, weight = (op.arguments.get(name) for name in ("self", "mat1", "mat2"))
    if not (isinstance(bias, Ref) and isinstance(rows, Ref) and isinstance(weight, Ref)):
        return False
    turned, joined = edit.flow.producer(weight.id), edit.flow.producer(rows.id)
    if turned is None or turned.name != "aten.t" or joined is None or joined.name != "aten.view":
        return False
    whole, joint = (edit.values[i].shape for i in (joined.inputs[0], rows.id))
    if release is None or len(whole) <= release.linear_dims or whole[-1] != joint[-1]:
        return False
    value = edit.values[out]
    plain = edit.view(Ref(out), value.shape, value.stride, op.repeats)
    edit.emit(op, "aten.mm.default", {"self": rows, "mat2": weight}, (plain,), facts=op.facts)
    _extra(edit, op, "aten.add_.Tensor", {"self": Ref(plain), "other": bias}, out)
    return True


_VECTOR = 4
"""The kernel that loads vectors takes rows of a multiple of so many elements
(`vectorized_layer_norm_kernel`)."""


def _moments_first(edit: Editor, op: Op) -> bool:
    """group_norm_kernel.cu, layer_norm_kernel.cu, Normalization.cuh: mean and variance, and then
    the result.

    Layer norms take both from one kernel that loads vectors, where the rows are whole vectors;
    batch norms from cuDNN, or in evaluation as they are given.
    """
    if len(op.outputs) != 3 or "mean" in op.arguments:
        return False
    out, mean, rstd = op.outputs
    grouped, rows = op.name == "aten.native_group_norm", edit.values[mean].elements
    of_channels = op.name in BATCH_NORMS
    if of_channels:
        native = is_batch_norm_native(op, edit.graph) and not has_channels_last(edit.values[out])
        fits = native and op.arguments.get("training", True)
    else:
        fits = grouped or (rows and edit.values[out].elements // rows % _VECTOR)
    if not fits or not rows:
        return False
    moments = {"input": op.arguments["input"], **({"channels": True} if of_channels else {})}
    edit.emit(op, "rooftrace.moments.default", moments, (mean, rstd), facts={BESIDE: op.name})
    known = {**op.arguments, "mean": Ref(mean), "rstd": Ref(rstd)}
    if grouped and edit.values[out].elements:
        channels = (int(op.arguments["N"]), int(op.arguments["C"]))
        scale = {"self": Ref(rstd), "other": Ref(mean)}
        known["scale"] = _temporary(edit, op, "aten.mul.Tensor", scale, (2, *channels), "fp32")
    edit.ops.append(taking(op, known, outputs=(out,), flops_torch=None))
    return True


def _sums_first(edit: Editor, op: Op) -> bool:
    """group_norm_kernel.cu: sums of each channel, gradients of weight and bias, and the image's."""
    mask = op.arguments.get("output_mask")
    if not isinstance(mask, tuple) or not mask[0] or len(op.outputs) != sum(mask):
        return False
    image, *weights = op.outputs
    shape = (2, int(op.arguments["N"]), int(op.arguments["C"]))
    read = {name: op.arguments[name] for name in ("grad_out", "input")}
    sums = _temporary(edit, op, "rooftrace.group_sums.default", read, shape, "fp32")
    known = {name: op.arguments[name] for name in ("mean", "rstd", "N")}
    if weights:
        made = {"sums": sums, **known}
        target = "rooftrace.group_weights.default"
        edit.emit(op, target, made, tuple(weights), facts={BESIDE: op.name})
    alone = {**op.arguments, "sums": sums, "output_mask": (True, False, False)}
    edit.ops.append(taking(op, alone, outputs=(image,), flops_torch=None))
    return True


def _gradients(edit: Editor, op: Op) -> bool:
    """Convolution.cpp: the gradients of input, weight and bias one after the other.
    layer_norm_kernel.cu: those of the weights, and that of the input.

    Each kernel reads the gradient of the result, the sum for the bias of a convolution, too.
    """
    grad, mask = op.arguments.get("grad_output"), op.arguments.get("output_mask")
    if not isinstance(mask, tuple) or sum(mask) < 2 or sum(mask) != len(op.outputs):
        return False
    made = dict(
        zip((place for place, wanted in enumerate(mask) if wanted), op.outputs, strict=True)
    )
    if not isinstance(grad, Ref) and not mask[0]:
        return False
    parts = [[place] for place in made] if isinstance(grad, Ref) else [[*made][1:], [0]]
    for part in parts:
        if isinstance(grad, Ref) and part == [_BIAS]:
            dims = tuple(d for d in range(len(edit.values[grad.id].shape)) if d != 1)
            _extra(edit, op, "aten.sum.dim_IntList", {"self": grad, "dim": dims}, made[_BIAS])
            continue
        alone = {**op.arguments, "output_mask": tuple(d in part for d in range(len(mask)))}
        edit.emit(op, op.target, alone, tuple(made[place] for place in part), facts=op.facts)
    return True


_BIAS = 2
"""The position of the bias among the gradients of a convolution."""


def _softmax_gradient(edit: Editor, op: Op) -> bool:
    """cuda/SoftMax.cu, softmax_backward_cuda_out: grad * output is a tensor of its own."""
    grad, output = op.arguments.get("grad_output"), op.arguments.get("output")
    if not (isinstance(grad, Ref) and isinstance(output, Ref)):
        return False
    value = edit.values[output.id]
    factors = {"self": grad, "other": output}
    dtype = edit.values[grad.id].dtype
    product = _temporary(edit, op, "aten.mul.Tensor", factors, value.shape, dtype)
    edit.ops.append(taking(op, {**op.arguments, "grad_output": product}))
    return True


def _safe_softmax(edit: Editor, op: Op) -> bool:
    """SoftMax.cpp, _safe_softmax: a softmax, and zeros in the rows that are -inf throughout."""
    item, dim = op.arguments.get("self"), op.arguments.get("dim", -1)
    if not isinstance(item, Ref):
        return False
    scores, out = edit.values[item.id], edit.values[op.outputs[0]]
    last = dim % len(scores.shape)
    rows = (*scores.shape[:last], 1, *scores.shape[last + 1 :])

    def made(shape: tuple[int, ...], dtype: str) -> int:
        return edit.value(shape, dtype, "temporary", op.repeats)

    hidden = made(scores.shape, "bool")
    plain = edit.view(Ref(op.outputs[0]), out.shape, out.stride, op.repeats)
    empty, zero = made(rows, "bool"), made((), out.dtype)
    softmax = {"self": item, "dim": dim, "half_to_float": False}
    _extra(edit, op, "aten._softmax.default", softmax, plain)
    _extra(edit, op, "aten.isneginf.default", {"self": item}, hidden)
    reduced = {"self": Ref(hidden), "dim": dim, "keepdim": True}
    _extra(edit, op, "aten.all.dim", reduced, empty)
    _extra(edit, op, "aten.scalar_tensor.default", {"s": 0.0}, zero)
    chosen = {"condition": Ref(empty), "self": Ref(zero), "other": Ref(plain)}
    edit.emit(op, "aten.where.self", chosen, op.outputs, facts=op.facts)
    return True


def _filled(edit: Editor, op: Op) -> bool:
    """TensorAdvancedIndexing.cpp, masked_fill: a clone, into which `masked_fill_` writes."""
    item, out = op.arguments.get("self"), edit.values[op.outputs[0]]
    if not isinstance(item, Ref):
        return False
    plain = edit.view(Ref(op.outputs[0]), out.shape, out.stride, op.repeats)
    _extra(edit, op, "aten.clone.default", {"self": item}, plain)
    edit.ops.append(taking(op, {**op.arguments, "self": Ref(plain)}))
    return True


def _log_sum(edit: Editor, op: Op) -> bool:
    """ReduceOps.cpp, logsumexp_out_impl: log(sum(exp(x - max))) + max; 0 for an infinite max."""
    item, dims = op.arguments.get("self"), op.arguments.get("dim")
    if not isinstance(item, Ref) or not edit.values[item.id].elements:
        return False
    value, out = edit.values[item.id], edit.values[op.outputs[0]]
    wanted = dims if isinstance(dims, tuple) else (dims,)
    over = {d % len(value.shape) for d in wanted or range(len(value.shape))}
    rows = tuple(1 if d in over else size for d, size in enumerate(value.shape))

    def made(
        target: str, shape: tuple[int, ...], first: Ref, dtype: str = out.dtype, **more: Argument
    ) -> Ref:
        return _temporary(edit, op, f"aten.{target}", {"self": first, **more}, shape, dtype)

    def within(target: str, there: Ref, **more: Argument) -> Ref:
        tensor = edit.values[there.id]
        out = edit.view(there, tensor.shape, tensor.stride, op.repeats)
        _extra(edit, op, f"aten.{target}", {"self": there, **more}, out)
        return Ref(out)

    top = made("amax.default", rows, item, dim=dims, keepdim=True)
    endless = made("eq.Scalar", rows, made("abs.default", rows, top), "bool", other=math.inf)
    top = within("masked_fill_.Scalar", top, mask=endless, value=0)
    powers = within("exp_.default", made("sub.Tensor", value.shape, item, other=top))
    log = within("log_.default", made("sum.dim_IntList", out.shape, powers, dim=dims))
    edit.emit(op, "aten.add_.Tensor", {"self": log, "other": top}, op.outputs, facts=op.facts)
    return True


_TERMS_APART = frozenset({"aten.mse_loss", "aten.smooth_l1_loss", "aten.huber_loss"})
"""Losses that write their terms into a tensor of their own."""
_TERMS_KEPT = frozenset(
    {"aten.mse_loss", "aten.smooth_l1_loss", "aten.binary_cross_entropy", "aten.soft_margin_loss"}
)
"""Losses whose result keeps the bytes of all its terms.

Loss.cpp and cuda/Loss.cu: the result is made for all terms, and resized, which frees nothing.
"""


def _reduced_loss(edit: Editor, op: Op) -> bool:
    """Loss.cpp, cuda/Loss.cu: a kernel for the terms, and their mean or sum."""
    x, target = op.arguments.get("self"), op.arguments.get("target")
    reduction = op.arguments.get("reduction", 1)
    if not (isinstance(x, Ref) and isinstance(target, Ref)) or reduction not in (1, 2):
        return False
    out = op.outputs[0]
    shape = _broadcast(edit.values[x.id].shape, edit.values[target.id].shape)
    if not shape:
        return False
    result = None
    if op.name in _TERMS_KEPT:
        result = edit.view(Ref(out), shape, Tensor.contiguous(shape), op.repeats)
    if result is None or op.name in _TERMS_APART:
        terms = edit.value(shape, edit.values[out].dtype, "temporary", op.repeats)
    else:
        terms = result
    if result not in (None, terms):
        made: dict[str, Argument] = {"size": shape}
        edit.emit(op, "aten.empty.memory_format", made, (result,), kind="view")
    alone = {**op.arguments, "reduction": 0}
    edit.ops.append(replace(op, arguments=alone, outputs=(terms,), flops_torch=None))
    name = "mean" if reduction == 1 else "sum"
    _extra(edit, op, f"aten.{name}.default", {"self": Ref(terms)}, out)
    return True


def _broadcast(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    """The shape to which two shapes broadcast."""
    pairs = zip_longest(reversed(first), reversed(second), fillvalue=1)
    return tuple(b if a == 1 else a for a, b in pairs)[::-1]


EAGER_FORMS = (
    EagerForm({"aten.roll"}, _rolled, "roll", "run", "as one kernel for each dimension"),
    EagerForm(
        {"aten._safe_softmax"},
        _safe_softmax,
        "safe softmax",
        "run",
        "as a softmax, a search for rows without a key, and a choice",
    ),
    EagerForm(
        {"aten.convolution"}, _biased, "convolution", "add", "the bias in a kernel of its own"
    ),
    EagerForm(
        {"aten.masked_fill"}, _filled, "fill", "write", "into a clone by a kernel of its own"
    ),
    EagerForm({"aten.logsumexp"}, _log_sum, "log-sum-exp", "run", "as nine kernels"),
    EagerForm({"aten.addmm"}, _linear, "product", "add", "the bias in a kernel of its own"),
    EagerForm(
        {"aten._softmax_backward_data"},
        _softmax_gradient,
        "softmax gradient",
        "run",
        "after a product with the probabilities, a kernel of its own",
    ),
    EagerForm(
        _TERMS_APART | _TERMS_KEPT,
        _reduced_loss,
        "loss",
        "write",
        "all its terms first, and reduce them in a kernel of its own",
    ),
    EagerForm(
        _SUMS | _SCANS,
        _cast_first,
        "sum or scan",
        "read",
        "a copy of its input in the precision of the result",
    ),
    EagerForm(
        {*_ANY_ORDER, *_IMAGES},
        _copied_in_order,
        "kernel",
        "read",
        "a copy in order of an input that is not contiguous",
    ),
    EagerForm(
        {"aten.native_group_norm", "aten.native_layer_norm", *BATCH_NORMS},
        _moments_first,
        "norm",
        "make",
        "mean and variance in a kernel of its own",
    ),
    EagerForm(
        {"aten.native_group_norm_backward"},
        _sums_first,
        "group norm",
        "make",
        "the sums and the gradients of its weights in kernels of their own",
    ),
    EagerForm(
        {"aten.native_layer_norm_backward", "aten._fused_rms_norm_backward"},
        _gradients,
        "norm",
        "make",
        "the gradients of its weights in a kernel of their own",
    ),
    EagerForm(
        {"aten.convolution_backward"},
        _gradients,
        "convolution",
        "make",
        "each gradient in a kernel of its own",
    ),
)
"""In the order of application: an added kernel may copy its input, and the gradients of a
convolution share such a copy."""
