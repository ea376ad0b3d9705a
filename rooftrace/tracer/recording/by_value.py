"""Ops whose results depend on values, which meta tensors lack, and quantised modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rooftrace.tracer import source, torch_private
from rooftrace.tracer.recording import taperecords
from rooftrace.tracer.recording.library import FROM_HOST, TO_HOST
from rooftrace.tracer.recording.ops import Call, entering
from rooftrace.tracer.recording.tape import Tape
from rooftrace.tracer.values import META, Values, masks, trees

# -- quantised modules -----------------------------------------------------------------------------
# Quantised modules of torch.ao: weights packed into objects of TorchScript, integers behind them.
#
# Their ops have no meta kernels.  A packed weight is unpacked once; the graph has its tensors
# instead.  Shapes come from the float op that corresponds to the quantised one.

_STORED = {torch.quint8: torch.uint8, torch.qint8: torch.int8, torch.qint32: torch.int32}
"""The dtype of a quantised tensor on meta: its integers."""
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
    unpacked = tape.packed.get(id(packed))
    if unpacked is None:
        with torch_private.disable_current_modes():
            inside = packed.unpack()
            tensors = inside if isinstance(inside, tuple) else (inside,)
            tensors = tuple(t for t in tensors if isinstance(t, Tensor))
            made = [_stored(t) for t in tensors]
        path = tape.values.where()
        for tensor, name in zip(made, ("weight", "bias"), strict=False):
            tape.enter(tensor, "parameter", f"{path}.{name}" if path else name)
        unpacked = tape.packed[id(packed)] = (packed, made)
    return list(unpacked[1])


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
    """A meta tensor like the op's result; None for an op that is not listed here."""
    kind = name.removeprefix("quantized.")
    weight = next(iter(parts.values()))[0] if parts else None
    tensors = [a for a in args if isinstance(a, Tensor)]
    with torch_private.disable_current_modes():
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


# -- by value --------------------------------------------------------------------------------------
# Ops whose result depends on values, which meta tensors do not have.
#
# Values come from `values`: exact where they are known, else from a policy that is recorded as an
# assumption. ANSWERS is the one table of such ops: each has a function that runs and records a
# call of it.

Answer = Callable[[Tape, Call], Any]
"""Runs and records a call, and returns its result; NotImplemented: run it like any other."""

ANSWERS: dict[str, Answer] = {}


def answers(*names: str) -> Callable[[Answer], Answer]:
    """Let a function run the ops of these names."""
    return entering(ANSWERS, *names)


def by_value(tape: Tape, call: Call) -> Any:
    """Run and record an op whose result depends on values; NotImplemented for all others."""
    if call.kwargs.get("check_errors"):
        _checked_inside(tape, call)
    answer = ANSWERS.get(call.name)
    if answer is not None:
        return answer(tape, call)
    if call.info.answers and not call.info.mutated:
        return _answered(tape, call)
    return by_packed(tape, call) if call.name.startswith("quantized.") else NotImplemented


def is_mask(index: Any) -> bool:
    """Whether an index is a mask: a boolean tensor that selects elements."""
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _lifted(values: Values, value: Tensor, taint: frozenset[int]) -> Tensor:
    """A meta tensor of this value; one that is on meta has none."""
    if value.device == META:
        return value
    out = torch.empty(value.shape, dtype=value.dtype, device=META)
    values.learn(out, value, taint)
    return out


ANSWERS.update(dict.fromkeys(QUANTIZED, by_packed))


# -- ops that answer with a Python value ---------------------------------------------------------


@answers("aten._local_scalar_dense")
def _read(tape: Tape, call: Call) -> Any:
    """item()"""
    value, taint = tape.values.value_of(call.args[0], "item()")
    tape.record(call, [], sync=True, taint=taint)
    return value.reshape(-1)[0].item()


@answers("aten.equal", "aten.allclose")
def _compared(tape: Tape, call: Call) -> bool:
    """Whether two tensors are equal; if their values are unknown, whether their shapes are."""
    values, args = tape.values, call.args
    first, second = (values.exact(t) for t in args[:2])
    if first is not None and second is not None:
        tape.record(call, [], sync=True, taint=first.taint | second.taint)
        return bool(call.func(first.value, second.value, *args[2:], **call.kwargs))
    decided = values.decision("branch")
    alike = tuple(args[0].shape) == tuple(args[1].shape)
    needed = alike and source.needed_answer(1) is not False
    taken = needed if decided is None else bool(decided)
    shown = "shapes are equal" if decided is None and taken == alike else str(taken)
    text = f"{call.short_name}() of unknown tensors is taken as: {shown}"
    tape.record(call, [], sync=True, taint=values.chosen("branch", text, taken, decided))
    return taken


def _answered(tape: Tape, call: Call) -> Any:
    """The Python value that an op returns, with zeros in place of unknown values."""
    values = tape.values
    decided = values.decision("value")
    value_for_unknown = 0 if decided is None else decided
    taint = taperecords.NO_TAINT
    unknown: list[Tensor] = []

    def value(tensor: Tensor) -> Tensor:
        nonlocal taint
        entry = values.exact(tensor)
        if entry is None:
            unknown.append(tensor)
            # One element seen everywhere: an unknown activation can be larger than this machine.
            fill = torch.full((), value_for_unknown, dtype=tensor.dtype)
            return fill.expand(tuple(tensor.shape))
        taint |= entry.taint
        return entry.value

    args, kwargs = torch_private.tree_map_only(Tensor, value, (tuple(call.args), dict(call.kwargs)))
    answer = call.func(*args, **kwargs)
    if unknown:
        text = (
            f"{call.short_name}() is asked with {value_for_unknown or 'zeros'} for what is unknown"
        )
        taint |= {values.assume("value", text, answer)}
    tape.record(call, [], sync=True, taint=taint)
    return answer


# -- checks: ops that raise by the value of a tensor ---------------------------------------------

_FUNCTIONAL_ASSERT = "aten._functional_assert_async"
_FACTORISATION_CHECK = "aten._linalg_check_errors"
_ASSERT = torch.ops.aten._assert_async.msg


@answers(_FACTORISATION_CHECK, "aten._assert_async", _FUNCTIONAL_ASSERT)
def _checked(tape: Tape, call: Call) -> Any:
    """A check of a value: raises torch's error if the value is known and fails the check.

    An unknown value passes.  Code often retries a failed factorisation with another matrix, so
    that success is recorded as an assumption.
    """
    values, args = tape.values, call.args
    entry = values.exact(args[0])
    taint = taperecords.NO_TAINT if entry is None else entry.taint
    if entry is None and call.name == _FACTORISATION_CHECK:
        text = f"{args[1]} of an unknown matrix is taken to succeed"
        taint = frozenset([values.assume("branch", text, False)])
    tape.record(call, [], sync=True, taint=taint)
    functional = call.name == _FUNCTIONAL_ASSERT
    if entry is not None and not entry.taint:
        rest = [item for item in args[1:] if not isinstance(item, Tensor)]
        with torch_private.disable_current_modes():
            check = _ASSERT if functional else call.func
            check(entry.value, *rest, **call.kwargs)
    return args[2] if functional else None


@answers("aten.cholesky")
def _factorised(tape: Tape, call: Call) -> Any:
    """A factorisation that checks its result: make the check, then run it like any other op."""
    if not call.kwargs.get("check_errors"):
        _checked_inside(tape, call)
    return NotImplemented


def _checked_inside(tape: Tape, call: Call) -> None:
    """Raise the error of a factorisation that checks its result, if its value is known."""
    values = tape.values
    matrices = trees.listed(call.args)
    entries = [values.exact(t) for t in matrices]
    exact = {id(t): e.value for t, e in zip(matrices, entries, strict=True) if e is not None}
    if any(entry is None for entry in entries):
        text = f"{call.short_name} of an unknown matrix is taken to succeed"
        values.assume("branch", text, False)
    elif all(e is not None and not e.taint and masks.small(e.value) for e in entries):
        args = torch_private.tree_map_only(Tensor, lambda t: exact[id(t)], tuple(call.args))
        with torch_private.disable_current_modes(), torch.no_grad():
            call.func(*args, **call.kwargs)


# -- ops whose output has as many elements as a value says ---------------------------------------


@answers("aten.index", "aten.index_put", "aten.index_put_", "aten._index_put_impl_")
def _masked_index(tape: Tape, call: Call) -> Any:
    """Run a boolean index as the integer indices of its true elements; record the boolean one."""
    values, args = tape.values, call.args
    if not any(is_mask(index) for index in args[1]):
        return NotImplemented
    indices: list[Tensor | None] = []
    taint = taperecords.NO_TAINT
    for item in args[1]:
        if is_mask(item):
            places, why = values.places(item, "a boolean index")
            taint |= why
            indices += [_lifted(values, column.contiguous(), why) for column in places.unbind(1)]
        else:
            indices.append(item)
    count = next((i.numel() for i in indices if i is not None), 0)
    rest = list(args[2:])
    if call.name != "aten.index" and rest and isinstance(rest[0], Tensor):
        put = rest[0]
        if put.dim() and put.shape[0] not in (1, count) and count:
            rest[0] = put[:1].expand(count, *put.shape[1:])
            text = f"index_put of {put.shape[0]} values where {count} positions are assumed"
            taint |= {values.assume("shape", text)}
    run_args = (args[0], indices, *rest)
    run = replace(call, args=run_args, tensors=trees.listed(run_args))
    out = run.run()
    with values.uniform.followed(call, [out]):
        taint |= values.propagate(run, [out]) or taperecords.NO_TAINT
    tape.record(call, [out], single=True, taint=taint)
    return out


@answers(
    "aten.nonzero",
    "aten.masked_select",
    "aten._unique2",
    "aten.unique_dim",
    "aten.unique_consecutive",
    "aten.bincount",
    "aten.unique_dim_consecutive",
    "aten.nonzero_static",
)
def _counted(tape: Tape, call: Call) -> Any:
    """nonzero, unique, bincount ...: the output's size is a value."""
    values, mask = tape.values, call.args[-1]
    alike = call.name in ("aten.nonzero", "aten.masked_select") and mask.shape == call.args[0].shape
    if alike and values.is_vast(mask):
        places, taint = values.places(mask, call.short_name)
        some = torch.empty(len(places), dtype=call.args[0].dtype, device=META)
        out = places if call.name == "aten.nonzero" else some
        tape.record(call, [out], single=True, taint=taint)
        return out
    taint = taperecords.NO_TAINT
    plain = []
    unknown = False
    exact: dict[int, Tensor] = {}
    for position, item in enumerate(call.args):
        if not isinstance(item, Tensor):
            plain.append(item)
        elif call.name == "aten.masked_select" and position == 0 and values.known(item) is None:
            unknown = True
            plain.append(torch.zeros(tuple(item.shape), dtype=item.dtype))
        else:
            entry = values.known(item)
            value, why = values.value_of(item, call.short_name)
            taint |= why
            plain.append(value)
            if entry is not None:
                exact[id(item)] = value

    def lift(value: Tensor) -> Tensor:
        if unknown:
            return torch.empty(value.shape, dtype=value.dtype, device=META)
        return _lifted(values, value, taint)

    all_exact = len(exact) == len(call.tensors)  # then equal calls are computed once
    made = values.results.of(call, exact) if all_exact else None
    made = call.func(*plain, **call.kwargs) if made is None else made
    out = torch_private.tree_map_only(Tensor, lift, made)
    tape.record(call, trees.listed(out), single=isinstance(out, Tensor), taint=taint)
    return out


@answers("aten.repeat_interleave")
def _interleaved(tape: Tape, call: Call) -> Any:
    """repeat_interleave with repeats in a tensor: they decide the size of the output, unless the
    call says it."""
    by_tensor = len(call.args) == 1 or isinstance(call.args[1], Tensor)
    if not by_tensor:
        return NotImplemented
    size = call.kwargs.get("output_size")
    if size is None or all(tape.values.exact(t) is not None for t in call.tensors):
        return _counted(tape, call)
    repeats = call.args[0]  # aten.repeat_interleave.Tensor(repeats): indices of the rows
    out = torch.empty((int(size),), dtype=repeats.dtype, device=META)
    tape.record(call, [out], single=True)
    return out


@answers("aten._padded_dense_to_jagged_forward")
def _jagged(tape: Tape, call: Call) -> Tensor:
    """The rows [L, ...] of a padded tensor [B, S, ...] between offsets, which also decide L."""
    padded, offsets, *rest = call.args
    rows = rest[0] if rest else call.kwargs.get("total_L")
    taint = taperecords.NO_TAINT
    if rows is None:
        ends, taint = tape.values.value_of(offsets[0], "the rows of a jagged tensor")
        rows = ends.reshape(-1)[-1].item()
    out = torch.empty((int(rows), *padded.shape[2:]), dtype=padded.dtype, device=META)
    tape.record(call, [out], single=True, taint=taint)
    return out


@answers("torchvision.nms")
def _suppressed(tape: Tape, call: Call) -> Tensor:
    """Non-maximum suppression: the boxes that stay; half of them if scores are unknown."""
    values, args = tape.values, call.args
    boxes, scores = (values.exact(t) for t in args[:2])
    if boxes is not None and scores is not None and not boxes.taint | scores.taint:
        kept = call.func(boxes.value, scores.value, *args[2:], **call.kwargs)
        out = _lifted(values, kept, taperecords.NO_TAINT)
        tape.record(call, [out], single=True)
        return out
    count = max(1, args[0].shape[0] // 2)
    text = "non-maximum suppression keeps half of the boxes"
    taint = frozenset([values.assume("nms", text, count)])
    out = _lifted(values, torch.arange(count), taint)
    tape.record(call, [out], single=True, taint=taint)
    return out


# -- copies to the host, and a scaler that looks at gradients ------------------------------------

_NOT_FOLLOWED = "a copy to the host of an unknown value is not followed"
_TO = torch.ops.aten._to_copy.default
_SCALAR = torch.ops.aten._local_scalar_dense.default


@answers("aten._to_copy")
def _between(tape: Tape, call: Call) -> Any:
    """Copies between device and host, as of `.cpu()`: floats stay on meta, and are followed there.

    Known integers (indices, lengths, masks) become real, because host code computes with them.
    Unknown ones stay on meta, which is recorded as an assumption.
    """
    device = call.kwargs.get("device")
    kind, tensor = None if device is None else torch.device(device).type, call.args[0]
    if kind == "meta" and tape.tags.on_host(tensor):
        return _from_host(tape, tensor, call.kwargs)
    if kind != "cpu" or tensor.device.type == "cpu":
        return NotImplemented
    values, entry = tape.values, tape.values.known(tensor)
    integers = not (tensor.is_floating_point() or tensor.is_complex())
    if entry is not None and integers and not tape.entries.is_stored(tensor):
        tape.record(call, [], sync=True, taint=entry.taint)
        return entry.value.to(call.kwargs.get("dtype") or entry.value.dtype).clone()
    out = _TO(tensor, device=META, **_wanted(call.kwargs))
    copied_to_host(tape, call, out)
    if entry is None:
        values.assume("host-copy", _NOT_FOLLOWED)
    elif masks.small(tensor):
        values.learn(out, entry.value.to(out.dtype).clone(), entry.taint)
    return out


def copied_to_host(tape: Tape, call: Call, out: Tensor) -> None:
    """Record that a `_to_copy` has copied its tensor to the host, as `out`.

    The host waits for it unless the call says `non_blocking`.
    """
    tape.record(Call.of(TO_HOST, call.args[0]), [out], single=True)
    if not call.kwargs.get("non_blocking"):
        tape.record(call, [], sync=True)


def _from_host(tape: Tape, tensor: Tensor, how: Mapping[str, Any]) -> Tensor:
    """The copy on the device of a tensor of the host, as keyword arguments of `_to_copy` say.

    Its precision is converted on the host, which is not counted.
    """
    out: Tensor = _TO(tensor, device=META, **_wanted(how))
    tape.record(Call.of(FROM_HOST, tensor), [out], single=True)
    return out


def _wanted(how: Mapping[str, Any]) -> dict[str, Any]:
    return {name: how.get(name) for name in ("dtype", "memory_format")}


@answers("aten.copy_")
def _into(tape: Tape, call: Call) -> Any:
    """A copy into a tensor of the host, which then holds the copied value if that is known, or one
    from the host into a tensor of the device."""
    target, source = call.args[:2]
    there, here = (t.device.type == "cpu" or tape.tags.on_host(t) for t in (target, source))
    if not there and tape.tags.on_host(source):
        call = Call.of(call.func, target, _from_host(tape, source, {}), *call.args[2:])
        call.run()
        tape.record(call, [target], single=True)
        return target
    if not there or here:
        return NotImplemented
    entry = tape.values.known(source)
    if entry is not None:
        target.copy_(entry.value)
        tape.record(Call.of(_SCALAR, source), [], sync=True, taint=entry.taint)
        return target
    tape.values.assume("host-copy", _NOT_FOLLOWED)
    tape.record(Call.of(TO_HOST, source), [target], single=True)
    return target


@answers("aten._amp_foreach_non_finite_check_and_unscale_")
def _unscaled(tape: Tape, call: Call) -> None:
    """A loss scaler's test for infinite gradients: they are taken as finite, so the step runs."""
    values, (gradients, infinite) = tape.values, call.args[:2]
    call.run()
    for gradient in gradients:
        values.forget(gradient)
    text = "all gradients are finite: the scaled step is taken"
    taint = frozenset([values.assume("value", text, 0)])
    tape.record(call, [], taint=taint)
    values.forget(infinite)
    values.learn(infinite, torch.zeros(tuple(infinite.shape)), taint)
