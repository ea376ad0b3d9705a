"""Quantised modules of torch.ao: weights packed into objects of TorchScript, integers behind them.

Their ops have no meta kernels.  A packed weight is unpacked once; the graph has its tensors
instead.  Shapes come from the float op that corresponds to the quantised one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rooftrace.tracer.ops import Call
from rooftrace.tracer.tape import Tape
from rooftrace.tracer.values import META

_STORED = {torch.quint8: torch.uint8, torch.qint8: torch.int8, torch.qint32: torch.int32}
"""What a quantised tensor is on meta: its integers."""
_QUANTIZE = ("aten.quantize_per_tensor", "aten.quantize_per_channel")
_QUANTIZE_DYNAMIC = "aten.quantize_per_tensor_dynamic"
QUANTIZED = frozenset({*_QUANTIZE, _QUANTIZE_DYNAMIC, "aten.dequantize", "aten.int_repr"})
"""Ops of aten that make quantised tensors, or floats of them."""
_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def by_packed(tape: Tape, call: Call) -> Any:
    """Run and record an op on quantised values; NotImplemented for all others."""
    name, args, kwargs = call.name, call.args, call.kwargs
    if name in _QUANTIZE or name == _QUANTIZE_DYNAMIC:
        dtype = kwargs.get("dtype", args[2] if name == _QUANTIZE_DYNAMIC else args[-1])
        if isinstance(args[0], Tensor) and dtype in _STORED:
            out = torch.empty_like(args[0], dtype=_STORED[dtype])
            return _recorded(tape, call, out)
    elif name == "aten.dequantize":
        if isinstance(args[0], Tensor) and not args[0].dtype.is_floating_point:
            out = torch.empty_like(args[0], dtype=torch.float32)
            return _recorded(tape, call, out)
    elif name == "aten.int_repr":
        return args[0]
    if not name.startswith("quantized."):
        return NotImplemented
    parts = {i: _unpacked(tape, a) for i, a in enumerate(args) if _is_packed(a)}
    result = _result(name, args, parts)
    if result is None:
        return NotImplemented
    unpacked = tuple(parts.get(i, item) for i, item in enumerate(args))
    return _recorded(tape, call.with_args(unpacked), result)


def _recorded(tape: Tape, call: Call, out: Tensor) -> Tensor:
    tape.record(call, [out], single=True)
    return out


def _is_packed(item: Any) -> bool:
    return isinstance(item, torch.ScriptObject) and hasattr(item, "unpack")


def _unpacked(tape: Tape, packed: Any) -> list[Tensor]:
    """Meta tensors of a packed weight's integers and its bias; always the same tensors."""
    known = tape.packed.get(id(packed))
    if known is None:
        with torch.utils._python_dispatch._disable_current_modes():
            inside = packed.unpack()
            tensors = inside if isinstance(inside, tuple) else (inside,)
            tensors = tuple(t for t in tensors if isinstance(t, Tensor))
            made = [_stored(t) for t in tensors]
        path = tape.values.where()
        for tensor, what in zip(made, ("weight", "bias"), strict=False):
            tape.enter(tensor, "parameter", f"{path}.{what}" if path else what)
        known = tape.packed[id(packed)] = (packed, made)
    return list(known[1])


def _stored(tensor: Tensor) -> Tensor:
    if not tensor.is_quantized:
        return torch.empty_like(tensor, device=META)
    bits = {torch.quint4x2: 4, torch.quint2x4: 2}.get(tensor.dtype, 8)
    shape = tuple(tensor.shape)
    if tensor.qscheme() == torch.per_channel_affine_float_qparams:
        # A table of rows: values, then a scale and a zero point, in fp32 after bytes, else in fp16.
        row = -(-shape[-1] * bits // 8) + (8 if bits == 8 else 4)
        shape = (*shape[:-1], row)
    return torch.empty(shape, dtype=_STORED.get(tensor.dtype, torch.uint8), device=META)


def _result(name: str, args: Any, parts: Mapping[int, list[Tensor]]) -> Tensor | None:
    """A meta tensor like the op's result; None for an op that is not known here."""
    kind = name.removeprefix("quantized.")
    weight = next(iter(parts.values()))[0] if parts else None
    tensors = [a for a in args if isinstance(a, Tensor)]
    with torch.utils._python_dispatch._disable_current_modes():
        if kind.startswith("linear") and weight is not None:
            x = tensors[0]
            return torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device=META)
        if kind.startswith("conv") and weight is not None:
            return _convolved(tensors[0], weight, next(a for a in args if _is_packed(a)))
        if kind.startswith("embedding") and weight is not None:
            return _rows("bag" in kind, tensors, args)
        if kind in ("add", "mul", "add_relu", "mul_relu") and len(tensors) == 2:
            sums = torch.add(*(torch.empty(t.shape, device=META) for t in tensors))
            return torch.empty_like(sums, dtype=tensors[0].dtype)
        if kind.startswith("cat"):
            return torch.cat(args[0], args[1])
        if kind == "matmul":
            a, b = (torch.empty(t.shape, device=META) for t in tensors)
            return torch.empty((a @ b).shape, dtype=tensors[0].dtype, device=META)
        if kind.startswith(("batch_norm", "relu6", "hardswish", "sigmoid", "leaky_relu", "elu",
                            "celu", "clamp", "threshold", "prelu", "dropout", "layer_norm",
                            "group_norm", "instance_norm", "softmax", "add_scalar",
                            "mul_scalar")):  # fmt: skip
            return torch.empty_like(tensors[0])
    return None


def _convolved(x: Tensor, weight: Tensor, packed: Any) -> Tensor:
    dims = x.dim() - 2
    if weight.dim() > x.dim():  # a convolution over one dimension is packed as one over two
        weight = weight.squeeze(2)
    stride, padding, dilation = (
        [int(n) for n in read()][-dims:]
        for read in (packed.stride, packed.padding, packed.dilation)
    )
    empty, filters = (torch.empty(t.shape, device=META) for t in (x, weight))
    groups = int(packed.groups())
    if packed.transpose():
        more = [int(n) for n in packed.output_padding()][-dims:]
        out = _TRANSPOSE[dims](empty, filters, None, stride, padding, more, groups, dilation)
    else:
        out = _CONVOLVE[dims](empty, filters, None, stride, padding, dilation, groups)
    return torch.empty(out.shape, dtype=x.dtype, device=META)


def _rows(bags: bool, tensors: list[Tensor], args: Any) -> Tensor:
    """[indices, width] of an embedding; [bags, width] of bags of indices."""
    packed = next(a for a in args if _is_packed(a))
    indices, width = tensors[0], int(packed.unpack().shape[1])
    shape = tuple(indices.shape)
    if bags and indices.dim() == 2:
        shape = shape[:1]
    elif bags:
        ends = len(args) > 8 and bool(args[8])  # include_last_offset
        shape = (tensors[1].numel() - ends,) if len(tensors) > 1 else (1,)
    return torch.empty((*shape, width), device=META)
