"""Steps of ONNX: on tensors by calls of torch, on constants by onnx's reference."""

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
    return getattr(functional, f"conv{rank}d")(  # type: ignore[no-any-return]
        item, weight, bias, attributes.get("strides") or [1] * rank, padding,
        attributes.get("dilations") or [1] * rank, attributes.get("group", 1),
    )  # fmt: skip


def _conv_transposed(attributes: Attributes, item: Tensor, weight: Any, bias: Any = None) -> Tensor:
    rank, weight = item.dim() - 2, tensor(weight)
    strides, grown, beside, pads = (
        numpy.asarray(attributes.get(name) or [usual] * count)
        for name, usual, count in (
            ("strides", 1, rank), ("dilations", 1, rank), ("output_padding", 0, rank),
            ("pads", 0, 2 * rank),
        )
    )  # fmt: skip
    begin, end = pads.reshape(2, rank)
    inner, kernel = numpy.asarray(item.shape[2:]), numpy.asarray(weight.shape[2:])
    sizes, auto = attributes.get("output_shape"), attributes.get("auto_pad", "NOTSET")
    if sizes or auto.startswith("SAME"):
        whole = (inner - 1) * strides + (kernel - 1) * grown + 1 + beside
        cut = numpy.maximum(whole - (sizes or inner * strides), 0)
        begin, end = (cut // 2, cut - cut // 2)[:: 1 if auto == "SAME_UPPER" else -1]
    both = numpy.minimum(begin, end)
    function = getattr(functional, f"conv_transpose{rank}d")
    settings = (strides.tolist(), both.tolist(), beside.tolist())
    group = attributes.get("group", 1)
    made: Tensor = function(item, weight, tensor(bias), *settings, group, grown.tolist())
    for axis, (first, last) in enumerate(zip(begin - both, end - both, strict=True), 2):
        made = made.narrow(axis, first, made.shape[axis] - first - last)
    return made


def _recurrent(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """A layer with `count` states.  Gates stand in the order of torch, and "reverse" runs forward:
    costs are the same.
    """

    def call(
        attributes: Attributes, item: Tensor, weight: Any, inner: Any, bias: Any = None,
        lengths: Any = None, *states: Any,
    ) -> Any:  # fmt: skip
        if any(state is not None for state in states[count:]):
            raise ValueError("peepholes of an LSTM are not read")
        weight, inner, bias = tensor(weight), tensor(inner), tensor(bias)
        (ways, rows, width), first = inner.shape, bool(attributes.get("layout"))
        held = []
        for way in range(ways):
            held += [weight[way], inner[way], *(() if bias is None else bias[way].split(rows))]
        empty = item.new_zeros(ways, item.shape[not first], width)
        begin = [empty if state is None else tensor(state) for state in (*states, None, None)]
        state = begin[:2] if count > 1 else begin[0]
        made, *last = function(item, state, held, bias is not None, 1, 0.0, False, ways > 1, first)
        made = made.unflatten(-1, (ways, width))
        if first:
            return made, *(part.transpose(0, 1) for part in last)
        return made.transpose(1, 2), *last

    return call


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


# -- norms and pools -------------------------------------------------------------------------------


def _batch_norm(
    attributes: Attributes, item: Tensor, scale: Any, shift: Any, mean: Any, variance: Any
) -> Tensor:
    mean, variance, scale, shift = map(tensor, (mean, variance, scale, shift))
    epsilon = attributes.get("epsilon", 1e-5)
    return functional.batch_norm(item, mean, variance, scale, shift, False, 0.0, epsilon)


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
    return getattr(functional, f"max_pool{rank}d")(  # type: ignore[no-any-return]
        item, attributes["kernel_shape"], attributes.get("strides") or [1] * rank, padding,
        attributes.get("dilations") or [1] * rank, bool(attributes.get("ceil_mode", 0)),
    )  # fmt: skip


def _average_pool(attributes: Attributes, item: Tensor) -> Tensor:
    rank = item.dim() - 2
    item, padding = _padded(attributes, item)
    return getattr(functional, f"avg_pool{rank}d")(  # type: ignore[no-any-return]
        item, attributes["kernel_shape"], attributes.get("strides") or [1] * rank, padding,
        bool(attributes.get("ceil_mode", 0)), bool(attributes.get("count_include_pad", 0)),
    )  # fmt: skip


def _resized(attributes: Attributes, item: Tensor, *said: Any) -> Tensor:
    """Resize(x, roi, scales, sizes), or of older operator sets, and Upsample: (x, scales)."""
    *_, scales, sizes = (None, *said, None) if len(said) < 3 else said
    size = list(item.shape)
    axes = attributes.get("axes") or range(len(size))
    if sizes is None:
        by = numpy.asarray(attributes.get("scales") if scales is None else scales).tolist()
        sizes = [math.floor(size[axis] * times) for axis, times in zip(axes, by, strict=True)]
    for axis, new in zip(axes, _numbers(sizes), strict=True):
        size[axis] = new
    if size[:2] != list(item.shape[:2]):
        raise ValueError(f"Resize of {list(item.shape)} to {size}: only images are resized")
    linear = ("linear", "bilinear", "trilinear")[len(size) - 3]
    mode = {"linear": linear, "cubic": "bicubic"}.get(attributes.get("mode", ""), "nearest")
    return functional.interpolate(item, size[2:], mode=mode)


def _quantizing(attributes: Attributes, item: Tensor, *parts: Any) -> list[Any]:
    """A scale and a zero point beside a tensor: numbers, or one for each place of an axis."""
    if attributes.get("block_size"):
        raise ValueError("scales of blocks (block_size) are not read")
    axis = attributes.get("axis", 1) % max(item.dim(), 1)
    sizes = [-1 if place == axis else 1 for place in range(item.dim())]
    made = [0 if part is None else tensor(part, item) for part in parts]
    return [p.reshape(sizes) if isinstance(p, Tensor) and p.dim() else p for p in made]


def _quantized(attributes: Attributes, item: Tensor, scale: Any, zero: Any = None) -> Tensor:
    kind = torch.uint8 if zero is None else _tensor(zero).dtype
    by, start = _quantizing(attributes, item, scale, zero)
    ends = torch.iinfo(kind)
    made: Tensor = (item / by).round() + start
    return made.clamp(ends.min, ends.max).to(kind)


def _widened(attributes: Attributes, item: Tensor, scale: Any, zero: Any = None) -> Tensor:
    by, start = _quantizing(attributes, item, scale, zero)
    made: Tensor = (item.to(_tensor(scale).dtype) - start) * by
    return made


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


def _slice(attributes: Attributes, item: Tensor, *said: Any) -> Tensor:
    cut = slices(attributes, item.dim(), *(None if p is None else _numbers(p) for p in said))
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
    "ConvTranspose": _conv_transposed,
    "LSTM": _recurrent(torch.lstm, 2),
    "GRU": _recurrent(torch.gru, 1),
    "RNN": _recurrent(torch.rnn_tanh, 1),
    "Gemm": _gemm,
    "MatMul": lambda a, x, y: torch.matmul(tensor(x), tensor(y)),
    "Einsum": lambda a, *items: torch.einsum(a["equation"], *items),
    "BatchNormalization": _batch_norm,
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
    "LRN": lambda a, x: functional.local_response_norm(
        x, a["size"], a.get("alpha", 1e-4), a.get("beta", 0.75), a.get("bias", 1.0)
    ),
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "GlobalAveragePool": _global(torch.mean),
    "GlobalMaxPool": _global(torch.amax),
    "ReduceMean": _reduced(torch.mean),
    "ReduceSum": _reduced(torch.sum),
    "ReduceMax": _reduced(torch.amax),
    "ReduceMin": _reduced(torch.amin),
    "Resize": _resized,
    "Upsample": _resized,
    "QuantizeLinear": _quantized,
    "DequantizeLinear": _widened,
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


# -- Steps of ONNX on constants: they compute the sizes of later steps -----------------------------

_FARTHEST = 1 << 30
"""An end of a slice further before the start than this stands for the start."""
_MOST = 1 << 16
"""Numbers that a result may have; a larger one is made as a tensor."""
NUMBER_OPS = frozenset({
    "Shape", "Size", "Gather", "Concat", "Unsqueeze", "Squeeze", "Slice", "Cast", "Reshape",
    "Expand", "ConstantOfShape", "Range", "Identity", "Trilu", "Transpose", "ReduceProd", "Div",
    "Add", "Sub", "Mul", "Mod", "Pow", "Neg", "Sqrt", "Reciprocal", "Floor", "Ceil", "Equal",
    "Greater", "Less", "Not", "And", "Or", "Where", "Min", "Max",
})  # fmt: skip


def on_numbers(op: str, opset: int, attributes: Attributes, inputs: Sequence[Any]) -> Any:
    """The result of a step on constants, as onnx's own reference computes it; None for too many
    numbers.  Of a tensor only the sizes are read."""
    from onnx import numpy_helper
    from onnx.reference.ops import load_op

    if op == "Range":
        first, last, by = (numpy.asarray(number).reshape(-1)[0] for number in inputs)
        if abs((last - first) / by) > _MOST:
            return None
    elif op in ("Expand", "ConstantOfShape"):
        own = numpy.shape(inputs[0]) if op == "Expand" else ()
        if math.prod(numpy.broadcast_shapes(own, tuple(map(int, inputs[-1])))) > _MOST:
            return None
    said = {
        name: numpy_helper.from_array(item.values) if hasattr(item, "values") else item
        for name, item in attributes.items()
    }
    arrays = [
        numpy.broadcast_to(False, tuple(item.shape)) if isinstance(item, Tensor) else item
        for item in inputs
    ]
    return load_op("", op, opset).eval(*arrays, **said)


def slices(
    attributes: Attributes, rank: int, starts: Any = None, ends: Any = None, axes: Any = None,
    steps: Any = None,
) -> tuple[slice, ...]:  # fmt: skip
    """The parts that a Slice takes of each dimension."""
    starts = numpy.atleast_1d(attributes["starts"] if starts is None else starts)
    ends = numpy.atleast_1d(attributes["ends"] if ends is None else ends)
    dims = _axes(attributes, axes) or range(len(starts))
    strides = [1] * len(starts) if steps is None else [int(step) for step in steps]
    cut = [slice(None)] * rank
    for axis, start, end, stride in zip(dims, starts, ends, strides, strict=True):
        stop = None if stride < 0 and int(end) < -_FARTHEST else int(end)
        cut[axis] = slice(int(start), stop, stride)
    return tuple(cut)


def fill(attributes: Attributes) -> tuple[Any, Any]:
    """The value of a ConstantOfShape, and its dtype in numpy."""
    value = attributes.get("value")
    array = None if value is None else value.values
    return (0.0, numpy.float32) if array is None else (array.reshape(-1)[0], array.dtype)
