"""Steps of ONNX: on tensors by calls of torch, on constants in numpy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import functional

Attributes = Mapping[str, Any]


def tensor(item: Any, like: Tensor | None = None) -> Any:
    """A constant as torch takes it: one alone as a number, several as a tensor."""
    if not isinstance(item, numpy.ndarray | numpy.generic):
        return item
    if item.size == 1 and like is not None:
        return item.reshape(-1)[0].item()
    return torch.tensor(item.tolist(), dtype=getattr(torch, str(item.dtype)))


def _tensor(item: Any) -> Tensor:
    made: Tensor = torch.as_tensor(tensor(item))
    return made


def _numbers(item: Any) -> list[int]:
    if isinstance(item, Tensor):
        return [int(number) for number in item.tolist()]
    return [int(number) for number in numpy.atleast_1d(item)]


def _axes(attributes: Attributes, said: Any) -> list[int]:
    axes = attributes.get("axes") if said is None else said
    return [] if axes is None else _numbers(axes)


def _both(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors, of which some may be constants."""

    def call(attributes: Attributes, *items: Any) -> Any:
        first = next(item for item in items if isinstance(item, Tensor))
        result = tensor(items[0], first) if len(items) > 1 else items[0]
        if len(items) == 1:
            return function(result)
        for item in items[1:]:
            result = function(result, tensor(item, first))
        return result

    return call


def _compared(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(attributes: Attributes, a: Any, b: Any) -> Any:
        first = a if isinstance(a, Tensor) else b
        if not isinstance(a, Tensor):
            a = torch.as_tensor(tensor(a, first))
        return function(a, tensor(b, first))

    return call


def _one(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda attributes, item, *_: function(item)


# -- products --------------------------------------------------------------------------------------


def _padded(attributes: Attributes, item: Tensor, value: float = 0.0) -> tuple[Tensor, list[int]]:
    """The input, padded where a convolution cannot, and the rest of the padding."""
    rank = item.dim() - 2
    pads = list(attributes.get("pads") or [0] * (2 * rank))
    auto = attributes.get("auto_pad", "NOTSET")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        strides = attributes.get("strides") or [1] * rank
        kernel = attributes["kernel_shape"]
        grown = attributes.get("dilations") or [1] * rank
        total = [
            max(0, (-(-size // s) - 1) * s + (k - 1) * d + 1 - size)
            for size, s, k, d in zip(item.shape[2:], strides, kernel, grown, strict=True)
        ]
        pads = [t // 2 for t in total] + [t - t // 2 for t in total]
    begin, end = pads[:rank], pads[rank:]
    if begin == end:
        return item, begin
    flat = [n for pair in zip(reversed(begin), reversed(end), strict=True) for n in pair]
    return functional.pad(item, flat, value=value), [0] * rank


def _conv(attributes: Attributes, item: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
    rank = item.dim() - 2
    weight, bias = tensor(weight), tensor(bias)
    settings = {"kernel_shape": list(weight.shape[2:]), **attributes}
    item, padding = _padded(settings, item)
    function = (functional.conv1d, functional.conv2d, functional.conv3d)[rank - 1]
    return function(
        item, weight, bias, attributes.get("strides") or [1] * rank, padding,
        attributes.get("dilations") or [1] * rank, attributes.get("group", 1),
    )  # fmt: skip


def _gemm(attributes: Attributes, a: Tensor, b: Tensor, c: Any = None) -> Tensor:
    a, b = tensor(a), tensor(b)
    c = tensor(c) if isinstance(c, numpy.ndarray) and c.ndim == 1 else c
    a = a.t() if attributes.get("transA") else a
    alpha, beta = attributes.get("alpha", 1.0), attributes.get("beta", 1.0)
    if alpha == 1 and beta == 1 and (c is None or (isinstance(c, Tensor) and c.dim() == 1)):
        return functional.linear(a, b if attributes.get("transB") else b.t(), c)
    product = a @ (b.t() if attributes.get("transB") else b)
    product = product if alpha == 1 else product * alpha
    return product if c is None else product + tensor(c, product) * beta


def _einsum(attributes: Attributes, *items: Tensor) -> Tensor:
    return torch.einsum(attributes["equation"], *items)


# -- norms and pools -------------------------------------------------------------------------------


def _batch_norm(
    attributes: Attributes, item: Tensor, scale: Any, shift: Any, mean: Any, variance: Any
) -> Tensor:
    parts = [
        part if isinstance(part, Tensor) else tensor(part)
        for part in (mean, variance, scale, shift)
    ]
    epsilon = attributes.get("epsilon", 1e-5)
    return functional.batch_norm(item, parts[0], parts[1], parts[2], parts[3], False, 0.0, epsilon)


def _layer_norm(attributes: Attributes, item: Tensor, scale: Any, shift: Any = None) -> Tensor:
    axis = attributes.get("axis", -1)
    shape = list(item.shape[axis:])
    weight, bias = (None if part is None else tensor(part) for part in (scale, shift))
    return functional.layer_norm(item, shape, weight, bias, attributes.get("epsilon", 1e-5))


def _rms_norm(attributes: Attributes, item: Tensor, scale: Any) -> Tensor:
    shape = list(item.shape[attributes.get("axis", -1) :])
    return functional.rms_norm(item, shape, tensor(scale), attributes.get("epsilon", 1e-5))


def _max_pool(attributes: Attributes, item: Tensor) -> Tensor:
    rank = item.dim() - 2
    item, padding = _padded(attributes, item, float("-inf"))
    function = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[rank - 1]
    return function(
        item, attributes["kernel_shape"], attributes.get("strides") or [1] * rank, padding,
        attributes.get("dilations") or [1] * rank, bool(attributes.get("ceil_mode", 0)),
    )  # fmt: skip


def _average_pool(attributes: Attributes, item: Tensor) -> Tensor:
    rank = item.dim() - 2
    item, padding = _padded(attributes, item)
    function = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[rank - 1]
    return function(
        item, attributes["kernel_shape"], attributes.get("strides") or [1] * rank, padding,
        bool(attributes.get("ceil_mode", 0)), bool(attributes.get("count_include_pad", 0)),
    )  # fmt: skip


def _global(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda attributes, item: function(item, tuple(range(2, item.dim())), keepdim=True)


def _reduced(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(attributes: Attributes, item: Tensor, axes: Any = None) -> Tensor:
        dims = _axes(attributes, axes) or list(range(item.dim()))
        if attributes.get("noop_with_empty_axes") and not _axes(attributes, axes):
            return item
        return function(item, dims, keepdim=bool(attributes.get("keepdims", 1)))

    return call


def _softmax(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(attributes: Attributes, item: Tensor) -> Tensor:
        axis = attributes.get("axis", -1 if attributes["opset"] >= 13 else 1)
        if attributes["opset"] >= 13 or axis in (-1, item.dim() - 1):
            return function(item, axis)
        return function(item.flatten(axis), axis).reshape(item.shape)

    return call


# -- shapes ----------------------------------------------------------------------------------------


def _reshape(attributes: Attributes, item: Any, shape: Any = None) -> Tensor:
    sizes = _numbers(attributes["shape"] if shape is None else shape)
    made = _tensor(item)
    kept = not attributes.get("allowzero")
    return made.reshape([made.shape[i] if n == 0 and kept else n for i, n in enumerate(sizes)])


def _flatten(attributes: Attributes, item: Tensor) -> Tensor:
    axis = attributes.get("axis", 1)
    return item.flatten(1) if axis == 1 else item.reshape(item.shape[:axis].numel(), -1)


def _split(attributes: Attributes, item: Tensor, sizes: Any = None) -> Sequence[Tensor]:
    axis = attributes.get("axis", 0)
    parts = attributes.get("split") if sizes is None else _numbers(sizes)
    if parts is None:
        parts = -(-item.shape[axis] // attributes["outputs"])
    return torch.split(item, parts, axis)


def _slice(
    attributes: Attributes, item: Tensor, starts: Any = None, ends: Any = None, axes: Any = None,
    steps: Any = None,
) -> Tensor:  # fmt: skip
    parts = (None if part is None else _numbers(part) for part in (starts, ends, axes, steps))
    cut = slices(attributes, item.dim(), *parts)
    backwards = [axis for axis, part in enumerate(cut) if (part.step or 1) < 0]
    return item.flip(backwards) if backwards else item[cut]


def _gather(attributes: Attributes, item: Any, index: Any) -> Tensor:
    axis = attributes.get("axis", 0)
    made = _tensor(item)
    if not isinstance(index, Tensor):
        indices = numpy.asarray(index)
        if indices.ndim == 0:
            return made.select(axis, int(indices))
        index = tensor(indices)
    if axis == 0 and made.dim() == 2 and made.is_floating_point():
        return functional.embedding(index, made)
    shape = (*made.shape[:axis], *index.shape, *made.shape[axis + 1 :])
    return made.index_select(axis, index.reshape(-1)).reshape(shape)


def _squeeze(attributes: Attributes, item: Tensor, axes: Any = None) -> Tensor:
    dims = _axes(attributes, axes)
    return item.squeeze(dims) if dims else item.squeeze()


def _unsqueeze(attributes: Attributes, item: Tensor, axes: Any = None) -> Tensor:
    dims = _axes(attributes, axes)
    rank = item.dim() + len(dims)
    for axis in sorted(place % rank for place in dims):
        item = item.unsqueeze(axis)
    return item


def _expand(attributes: Attributes, item: Any, shape: Any) -> Tensor:
    made = _tensor(item)
    return made.expand(numpy.broadcast_shapes(tuple(made.shape), tuple(_numbers(shape))))


def _filled(attributes: Attributes, shape: Any) -> Tensor:
    value, dtype = fill(attributes)
    kind = getattr(torch, str(numpy.dtype(dtype)))
    return torch.full(
        _numbers(shape), value.item() if hasattr(value, "item") else value, dtype=kind
    )


def _pad(attributes: Attributes, item: Tensor, pads: Any = None, value: Any = None) -> Tensor:
    numbers = _numbers(attributes["pads"] if pads is None else pads)
    rank = item.dim()
    flat = [n for i in reversed(range(rank)) for n in (numbers[i], numbers[rank + i])]
    mode = {"constant": "constant", "reflect": "reflect", "edge": "replicate"}[
        attributes.get("mode", "constant")
    ]
    if mode == "constant":
        return functional.pad(item, flat, value=float(tensor(value, item) or 0))
    return functional.pad(item, flat[: 2 * (rank - 2)], mode)


def _cast(attributes: Attributes, item: Tensor) -> Tensor:
    from onnx import helper

    name = str(helper.tensor_dtype_to_np_dtype(attributes["to"]))
    return item.to(getattr(torch, name))


def _where(attributes: Attributes, condition: Any, a: Any, b: Any) -> Tensor:
    first = next((item for item in (a, b) if isinstance(item, Tensor)), None)
    return torch.where(_tensor(condition), tensor(a, first), tensor(b, first))


def _clip(attributes: Attributes, item: Tensor, low: Any = None, high: Any = None) -> Tensor:
    least = attributes.get("min") if low is None else tensor(low, item)
    most = attributes.get("max") if high is None else tensor(high, item)
    return torch.clamp(item, least, most)


OPS: Mapping[str, Callable[..., Any]] = {
    "Conv": _conv,
    "Gemm": _gemm,
    "MatMul": lambda a, x, y: torch.matmul(tensor(x), tensor(y)),
    "Einsum": _einsum,
    "BatchNormalization": _batch_norm,
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "GlobalAveragePool": _global(torch.mean),
    "GlobalMaxPool": _global(torch.amax),
    "ReduceMean": _reduced(torch.mean),
    "ReduceSum": _reduced(torch.sum),
    "ReduceMax": _reduced(torch.amax),
    "ReduceMin": _reduced(torch.amin),
    "Softmax": _softmax(torch.softmax),
    "LogSoftmax": _softmax(torch.log_softmax),
    "Relu": _one(torch.relu),
    "LeakyRelu": lambda a, x: functional.leaky_relu(x, a.get("alpha", 0.01)),
    "Elu": lambda a, x: functional.elu(x, a.get("alpha", 1.0)),
    "HardSigmoid": _one(functional.hardsigmoid),
    "HardSwish": _one(functional.hardswish),
    "Sigmoid": _one(torch.sigmoid),
    "Softplus": _one(functional.softplus),
    "Tanh": _one(torch.tanh),
    "Gelu": lambda a, x: functional.gelu(x, approximate=a.get("approximate", "none")),
    "Erf": _one(torch.erf),
    "Exp": _one(torch.exp),
    "Log": _one(torch.log),
    "Sqrt": _one(torch.sqrt),
    "Reciprocal": _one(torch.reciprocal),
    "Neg": _one(torch.neg),
    "Abs": _one(torch.abs),
    "Sin": _one(torch.sin),
    "Cos": _one(torch.cos),
    "Floor": _one(torch.floor),
    "Ceil": _one(torch.ceil),
    "Identity": _one(lambda x: x),
    "Dropout": _one(lambda x: x),
    "Not": _one(torch.logical_not),
    "Add": _both(lambda x, y: x + y),
    "Sub": _both(lambda x, y: x - y),
    "Mul": _both(lambda x, y: x * y),
    "Div": _both(lambda x, y: x / y if _floats(x, y) else x // y),
    "Pow": _both(lambda x, y: x**y),
    "Mod": _both(lambda x, y: x % y),
    "Sum": _both(lambda x, y: x + y),
    "Min": _both(lambda x, y: torch.minimum(x, torch.as_tensor(y))),
    "Max": _both(lambda x, y: torch.maximum(x, torch.as_tensor(y))),
    "And": _both(torch.logical_and),
    "Or": _both(torch.logical_or),
    "Equal": _compared(torch.eq),
    "Greater": _compared(torch.gt),
    "GreaterOrEqual": _compared(torch.ge),
    "Less": _compared(torch.lt),
    "LessOrEqual": _compared(torch.le),
    "Where": _where,
    "Clip": _clip,
    "Cast": _cast,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Transpose": lambda a, x: x.permute(a.get("perm") or tuple(reversed(range(x.dim())))),
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Concat": lambda a, *items: torch.cat([_tensor(i) for i in items], a["axis"]),
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
    "Expand": _expand,
    "ConstantOfShape": _filled,
    "Range": lambda a, *ends: torch.arange(*(tensor(end, torch.empty(0)) for end in ends)),
    "Pad": _pad,
    "Tile": lambda a, x, times: x.repeat(_numbers(times)),
    "CumSum": lambda a, x, axis: torch.cumsum(x, _numbers(axis)[0]),
    "Trilu": lambda a, x, k=None: (torch.triu if a.get("upper", 1) else torch.tril)(
        x, 0 if k is None else _numbers(k)[0]
    ),
}


def _floats(*items: Any) -> bool:
    return any(
        item.is_floating_point() if isinstance(item, Tensor) else isinstance(item, float)
        for item in items
    )


# -- Steps of ONNX on constants, in numpy: they compute the sizes of later steps -------------------

_FARTHEST = 1 << 30
"""An end of a slice further before the start than this stands for the start."""
_MOST = 1 << 16
"""Numbers that a result may have; a larger one is made as a tensor."""


def _axes_of_numbers(attributes: Attributes, said: Any) -> tuple[int, ...]:
    axes = attributes.get("axes") if said is None else said
    return () if axes is None else tuple(int(axis) for axis in numpy.atleast_1d(axes))


def _shape(attributes: Attributes, item: Any) -> Any:
    sizes = tuple(item.shape)[attributes.get("start", 0) : attributes.get("end")]
    return numpy.asarray([int(size) for size in sizes], numpy.int64)


def _unsqueeze_numbers(attributes: Attributes, item: Any, axes: Any = None) -> Any:
    return numpy.expand_dims(item, _axes_of_numbers(attributes, axes))


def _squeeze_numbers(attributes: Attributes, item: Any, axes: Any = None) -> Any:
    return numpy.squeeze(item, _axes_of_numbers(attributes, axes) or None)


def _slice_numbers(
    attributes: Attributes, item: Any, starts: Any = None, ends: Any = None, axes: Any = None,
    steps: Any = None,
) -> Any:  # fmt: skip
    return item[slices(attributes, item.ndim, starts, ends, axes, steps)]


def slices(
    attributes: Attributes, rank: int, starts: Any, ends: Any, axes: Any, steps: Any
) -> tuple[slice, ...]:
    """The parts that a Slice takes of each dimension."""
    starts = numpy.atleast_1d(attributes["starts"] if starts is None else starts)
    ends = numpy.atleast_1d(attributes["ends"] if ends is None else ends)
    dims = _axes_of_numbers(attributes, axes) or range(len(starts))
    strides = [1] * len(starts) if steps is None else [int(step) for step in steps]
    cut = [slice(None)] * rank
    for axis, start, end, stride in zip(dims, starts, ends, strides, strict=True):
        stop = None if stride < 0 and int(end) < -_FARTHEST else int(end)
        cut[axis] = slice(int(start), stop, stride)
    return tuple(cut)


def _filled_numbers(attributes: Attributes, shape: Any) -> Any:
    sizes = tuple(int(size) for size in shape)
    if math.prod(sizes) > _MOST:
        return None
    return numpy.full(sizes, *fill(attributes))


def fill(attributes: Attributes) -> tuple[Any, Any]:
    """The value of a ConstantOfShape, and its dtype in numpy."""
    value = attributes.get("value")
    array = None if value is None else value.values
    return (0.0, numpy.float32) if array is None else (array.reshape(-1)[0], array.dtype)


def _range(attributes: Attributes, start: Any, end: Any, step: Any) -> Any:
    first, last, by = (numpy.asarray(n).reshape(-1)[0] for n in (start, end, step))
    return None if abs((last - first) / by) > _MOST else numpy.arange(first, last, by)


def _expand_numbers(attributes: Attributes, item: Any, shape: Any) -> Any:
    sizes = numpy.broadcast_shapes(item.shape, tuple(int(size) for size in shape))
    return None if math.prod(sizes) > _MOST else numpy.broadcast_to(item, sizes)


def _reshape_numbers(attributes: Attributes, item: Any, shape: Any) -> Any:
    return item.reshape([int(size) for size in shape])


def _cast_numbers(attributes: Attributes, item: Any) -> Any:
    from onnx import helper

    return item.astype(helper.tensor_dtype_to_np_dtype(attributes["to"]))


def _divide(attributes: Attributes, a: Any, b: Any) -> Any:
    integral = numpy.asarray(a).dtype.kind in "iu"
    return numpy.floor_divide(a, b) if integral else numpy.divide(a, b)


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda attributes, *items: function(*items)


NUMBER_OPS: Mapping[str, Callable[..., Any]] = {
    "Shape": _shape,
    "Size": lambda attributes, item: numpy.asarray(math.prod(item.shape), numpy.int64),
    "Gather": lambda a, item, index: numpy.take(item, index, axis=a.get("axis", 0)),
    "Concat": lambda a, *items: numpy.concatenate(
        [numpy.atleast_1d(item) for item in items], axis=a["axis"]
    ),
    "Unsqueeze": _unsqueeze_numbers,
    "Squeeze": _squeeze_numbers,
    "Slice": _slice_numbers,
    "Cast": _cast_numbers,
    "Reshape": _reshape_numbers,
    "Expand": _expand_numbers,
    "ConstantOfShape": _filled_numbers,
    "Range": _range,
    "Identity": _plain(lambda item: item),
    "Trilu": lambda a, item, k=0: (numpy.triu if a.get("upper", 1) else numpy.tril)(item, int(k)),
    "Transpose": lambda a, item: numpy.transpose(item, a.get("perm")),
    "ReduceProd": lambda a, item, axes=None: numpy.prod(item, keepdims=bool(a.get("keepdims", 1))),
    "Div": _divide,
    "Add": _plain(numpy.add),
    "Sub": _plain(numpy.subtract),
    "Mul": _plain(numpy.multiply),
    "Mod": _plain(numpy.mod),
    "Pow": _plain(numpy.power),
    "Neg": _plain(numpy.negative),
    "Sqrt": _plain(numpy.sqrt),
    "Reciprocal": _plain(numpy.reciprocal),
    "Floor": _plain(numpy.floor),
    "Ceil": _plain(numpy.ceil),
    "Equal": _plain(numpy.equal),
    "Greater": _plain(numpy.greater),
    "Less": _plain(numpy.less),
    "Not": _plain(numpy.logical_not),
    "And": _plain(numpy.logical_and),
    "Or": _plain(numpy.logical_or),
    "Where": _plain(numpy.where),
    "Min": _plain(numpy.minimum),
    "Max": _plain(numpy.maximum),
}
