"""Steps of ONNX on constants, in numpy: they compute the sizes of later steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy

_FARTHEST = 1 << 30
"""An end of a slice further before the start than this stands for the start."""
_MOST = 1 << 16
"""Numbers that a result may have; a larger one is made as a tensor."""
Attributes = Mapping[str, Any]


def _axes(attributes: Attributes, said: Any) -> tuple[int, ...]:
    axes = attributes.get("axes") if said is None else said
    return () if axes is None else tuple(int(axis) for axis in numpy.atleast_1d(axes))


def _shape(attributes: Attributes, item: Any) -> Any:
    sizes = tuple(item.shape)[attributes.get("start", 0) : attributes.get("end")]
    return numpy.asarray([int(size) for size in sizes], numpy.int64)


def _unsqueeze(attributes: Attributes, item: Any, axes: Any = None) -> Any:
    return numpy.expand_dims(item, _axes(attributes, axes))


def _squeeze(attributes: Attributes, item: Any, axes: Any = None) -> Any:
    return numpy.squeeze(item, _axes(attributes, axes) or None)


def _slice(
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
    dims = _axes(attributes, axes) or range(len(starts))
    strides = [1] * len(starts) if steps is None else [int(step) for step in steps]
    cut = [slice(None)] * rank
    for axis, start, end, stride in zip(dims, starts, ends, strides, strict=True):
        stop = None if stride < 0 and int(end) < -_FARTHEST else int(end)
        cut[axis] = slice(int(start), stop, stride)
    return tuple(cut)


def _filled(attributes: Attributes, shape: Any) -> Any:
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


def _expand(attributes: Attributes, item: Any, shape: Any) -> Any:
    sizes = numpy.broadcast_shapes(item.shape, tuple(int(size) for size in shape))
    return None if math.prod(sizes) > _MOST else numpy.broadcast_to(item, sizes)


def _reshape(attributes: Attributes, item: Any, shape: Any) -> Any:
    return item.reshape([int(size) for size in shape])


def _cast(attributes: Attributes, item: Any) -> Any:
    from onnx import helper

    return item.astype(helper.tensor_dtype_to_np_dtype(attributes["to"]))


def _divide(attributes: Attributes, a: Any, b: Any) -> Any:
    integral = numpy.asarray(a).dtype.kind in "iu"
    return numpy.floor_divide(a, b) if integral else numpy.divide(a, b)


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda attributes, *items: function(*items)


OPS: Mapping[str, Callable[..., Any]] = {
    "Shape": _shape,
    "Size": lambda attributes, item: numpy.asarray(math.prod(item.shape), numpy.int64),
    "Gather": lambda a, item, index: numpy.take(item, index, axis=a.get("axis", 0)),
    "Concat": lambda a, *items: numpy.concatenate(
        [numpy.atleast_1d(item) for item in items], axis=a["axis"]
    ),
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Slice": _slice,
    "Cast": _cast,
    "Reshape": _reshape,
    "Expand": _expand,
    "ConstantOfShape": _filled,
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
