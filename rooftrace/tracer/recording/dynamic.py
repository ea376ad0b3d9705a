"""Ops that a run on meta tensors alone cannot do: they depend on values, or have no meta kernel.

Values come from `values` (exact where known, else by a named policy that is put on record); an op
without a meta kernel goes down a ladder of substitutes, each on record too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch._higher_order_ops.scan import generic_scan
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from rooftrace.tracer.recording.packed import QUANTIZED, by_packed
from rooftrace.tracer.recording.values import MAX_INTEGERS, META, Values, run_on_cpu, small
from rooftrace.tracer.tensors import listed, pieces_of

if TYPE_CHECKING:
    from rooftrace.tracer.recording.recorder import OpInfo, Recorder

_MASKED_INDEX = frozenset(
    {"aten.index", "aten.index_put", "aten.index_put_", "aten._index_put_impl_"}
)
_COUNTED_OUTPUT = frozenset(
    {
        "aten.nonzero",
        "aten.masked_select",
        "aten._unique2",
        "aten.unique_dim",
        "aten.unique_consecutive",
        "aten.bincount",
        "aten.repeat_interleave",
        "aten.unique_dim_consecutive",
        "aten.nonzero_static",
    }
)
_CHECKS = frozenset(
    {"aten._linalg_check_errors", "aten._assert_async", "aten._functional_assert_async"}
)
"""Ops that raise by the value of a tensor, and make nothing."""
_COMPARISONS = frozenset({"aten.equal", "aten.allclose"})
_GROUPED_PRODUCTS = frozenset({"aten._grouped_mm", "aten._scaled_grouped_mm"})
_TYPED_SUMS = frozenset({"aten.addmm.dtype", "aten.baddbmm.dtype"})
"""Products with a type of the output, whose meta kernels multiply by it: addmm until torch 2.13."""
_MASKED = -1e4
"""An additive attention mask below this hides its position."""
_MAX_ZEROS = 1 << 24
"""The largest inputs (elements) that are made for real to learn an op's output shape."""
_NO_FAKE = "no fake impl registered"
"""What torch says of a custom op of Python that does not know its shapes."""
_MAX_LOOPS = 4096
"""How often a while_loop may go round."""
_FUNCTIONAL_ASSERT = "aten._functional_assert_async"
_ASSERT = torch.ops.aten._assert_async.msg
_READ = torch.ops.aten._local_scalar_dense.default
_REFUSED = (NotImplementedError, RuntimeError, TypeError)


# -- ops whose result depends on values ----------------------------------------------------------


def by_value(
    recorder: Recorder, func: Any, info: OpInfo, args: Any, kwargs: Mapping[str, Any]
) -> Any:
    """Run and record an op whose result depends on values; NotImplemented for all others."""
    name = info.name
    if name == "aten._local_scalar_dense":
        value, taint = recorder.values.value_of(args[0], "item()")
        recorder.record(func, args, kwargs, [], sync=True, taint=taint)
        return value.reshape(-1)[0].item()
    if name in _CHECKS:
        return _checked(recorder, func, name, args, kwargs)
    if name == "aten.cholesky" or kwargs.get("check_errors"):
        _checked_inside(recorder, func, name, args, kwargs)
    if name in _COMPARISONS:
        return _compared(recorder, func, info, args, kwargs)
    if info.answers and not info.mutated:
        return _answered(recorder, func, name, args, kwargs)
    if name in _MASKED_INDEX:
        if any(isinstance(i, Tensor) and _is_mask(i) for i in args[1]):
            return _masked_index(recorder, func, info, args, kwargs)
    elif name in _COUNTED_OUTPUT:
        if name != "aten.repeat_interleave" or len(args) == 1 or isinstance(args[1], Tensor):
            return _counted(recorder, func, name, args, kwargs)
    elif name == "aten._to_copy":
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cpu":
            return _to_host(recorder, func, args, kwargs)
    elif name == "aten.copy_":
        if args[0].device.type == "cpu" and args[1].device.type != "cpu":
            return _into_host(recorder, func, args, kwargs)
    elif name.startswith("quantized.") or name in QUANTIZED:
        return by_packed(recorder, func, name, args, kwargs)
    elif name == "aten._padded_dense_to_jagged_forward":
        return _jagged(recorder, func, args, kwargs)
    elif name == "torchvision.nms":
        return _suppressed(recorder, func, args, kwargs)
    elif name == "aten._amp_foreach_non_finite_check_and_unscale_":
        return _unscaled(recorder, func, args, kwargs)
    return NotImplemented


def _is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _checked(recorder: Recorder, func: Any, name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """A check of a value, which raises what torch raises where the value is known.

    Else it passes.  Code goes on after a failed factorisation, with another matrix: that it does
    not fail is put on record.
    """
    values = recorder.values
    entry = values.known(args[0]) or values.from_data(args[0])
    taint = frozenset() if entry is None else entry.taint
    if entry is None and name == "aten._linalg_check_errors":
        text = f"{args[1]} of an unknown matrix is taken to succeed"
        taint = frozenset([values.assume("branch", text, False)])
    recorder.record(func, args, kwargs, [], sync=True, taint=taint)
    if entry is not None and not entry.taint:
        rest = [item for item in args[1:] if not isinstance(item, Tensor)]
        with _disable_current_modes():
            check = _ASSERT if name == _FUNCTIONAL_ASSERT else func
            check(entry.value, *rest, **kwargs)
    return args[2] if name == _FUNCTIONAL_ASSERT else None


def _checked_inside(
    recorder: Recorder, func: Any, name: str, args: Any, kwargs: Mapping[str, Any]
) -> None:
    """Raise what a factorisation with a check of its own raises, as `_checked` does."""
    values = recorder.values
    matrices = listed(args)
    entries = [values.known(t) or values.from_data(t) for t in matrices]
    if any(entry is None for entry in entries):
        short = name.removeprefix("aten.")
        values.assume("branch", f"{short} of an unknown matrix is taken to succeed", False)
    elif all(entry is not None and not entry.taint and small(entry.value) for entry in entries):
        known = {id(t): e.value for t, e in zip(matrices, entries, strict=True) if e is not None}
        given = tree_map_only(Tensor, lambda t: known[id(t)], tuple(args))
        with _disable_current_modes(), torch.no_grad():
            func(*given, **kwargs)


def _compared(
    recorder: Recorder, func: Any, info: OpInfo, args: Any, kwargs: Mapping[str, Any]
) -> bool:
    """equal and allclose answer with a Python bool."""
    values = recorder.values
    first, second = (values.known(t) or values.from_data(t) for t in args[:2])
    if first is not None and second is not None:
        recorder.record(func, args, kwargs, [], sync=True, taint=first.taint | second.taint)
        return bool(func(first.value, second.value, *args[2:], **kwargs))
    decided = values.decision("branch")
    taken = tuple(args[0].shape) == tuple(args[1].shape) if decided is None else bool(decided)
    shown = "shapes are equal" if decided is None else f"{taken}, as given"
    taint = values.assume(
        "branch", f"{info.name.removeprefix('aten.')}() of unknown tensors is taken as: {shown}"
    )
    recorder.record(func, args, kwargs, [], sync=True, taint=frozenset([taint]))
    return taken


def _answered(
    recorder: Recorder, func: Any, name: str, args: Any, kwargs: Mapping[str, Any]
) -> Any:
    """An op that answers with a Python value: of known values, with zeros for unknown ones."""
    values = recorder.values
    decided = values.decision("value")
    value_for_unknown = 0 if decided is None else decided
    taint: frozenset[int] = frozenset()
    unknown: list[Tensor] = []

    def value(tensor: Tensor) -> Tensor:
        nonlocal taint
        entry = values.known(tensor) or values.from_data(tensor)
        if entry is None:
            unknown.append(tensor)
            # One element seen everywhere: an unknown activation can be larger than this machine.
            fill = torch.full((), value_for_unknown, dtype=tensor.dtype)
            return fill.expand(tuple(tensor.shape))
        taint |= entry.taint
        return entry.value

    given, named = tree_map_only(Tensor, value, (tuple(args), dict(kwargs)))
    answer = func(*given, **named)
    if unknown:
        short = name.removeprefix("aten.")
        taint |= {
            values.assume(
                "value",
                f"{short}() is asked with {value_for_unknown or 'zeros'} for what is unknown",
                answer,
            )
        }
    recorder.record(func, args, kwargs, [], sync=True, taint=taint)
    return answer


def _masked_index(
    recorder: Recorder, func: Any, info: OpInfo, args: Any, kwargs: Mapping[str, Any]
) -> Any:
    """Run a boolean index as the integer indices of its true elements; record it as it was."""
    values = recorder.values
    indices: list[Tensor | None] = []
    taint: frozenset[int] = frozenset()
    for item in args[1]:
        if isinstance(item, Tensor) and _is_mask(item):
            value, why = values.value_of(item, "a boolean index")
            taint |= why
            indices += [
                _lifted(values, column.contiguous(), why) for column in value.nonzero().unbind(1)
            ]
        else:
            indices.append(item)
    count = next((i.numel() for i in indices if i is not None), 0)
    rest = list(args[2:])
    if info.name != "aten.index" and rest and isinstance(rest[0], Tensor):
        given = rest[0]
        if given.dim() and given.shape[0] not in (1, count) and count:
            rest[0] = given[:1].expand(count, *given.shape[1:])
            taint |= {
                values.assume(
                    "shape",
                    f"index_put of {given.shape[0]} values where {count} positions are assumed",
                )
            }
    run = (args[0], indices, *rest)
    out = func(*run, **kwargs)
    if info.mutated:
        values.forget(args[0])
    else:
        values.propagate(info.name, func, run, kwargs, listed(run), [out], [])
    recorder.record(func, args, kwargs, [out], single=True, taint=taint)
    return out


def _lifted(values: Values, value: Tensor, taint: frozenset[int]) -> Tensor:
    """A meta tensor of this value."""
    out = torch.empty(value.shape, dtype=value.dtype, device=META)
    values.learn(out, value, taint)
    return out


def _counted(recorder: Recorder, func: Any, name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """nonzero, unique, bincount ...: the output's size is a value."""
    values = recorder.values
    taint: frozenset[int] = frozenset()
    plain = []
    unknown = False
    for position, item in enumerate(args):
        if not isinstance(item, Tensor):
            plain.append(item)
        elif name == "aten.masked_select" and position == 0 and values.known(item) is None:
            unknown = True
            plain.append(torch.zeros(tuple(item.shape), dtype=item.dtype))
        else:
            value, why = values.value_of(item, name.removeprefix("aten."))
            taint |= why
            plain.append(value)

    def lift(value: Tensor) -> Tensor:
        if unknown:
            return torch.empty(value.shape, dtype=value.dtype, device=META)
        return _lifted(values, value, taint)

    out = tree_map_only(Tensor, lift, func(*plain, **kwargs))
    recorder.record(func, args, kwargs, listed(out), single=isinstance(out, Tensor), taint=taint)
    return out


def _to_host(recorder: Recorder, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    """`.cpu()`: floats stay on meta, so that what is made of them is recorded, wherever it runs.

    Known whole numbers (indices, lengths, masks) become real: the host keeps its books with them.
    Unknown ones stay on meta, and that is said.
    """
    values, tensor = recorder.values, args[0]
    entry = values.known(tensor)
    taint = entry.taint if entry is not None else frozenset()
    recorder.record(func, args, kwargs, [], sync=True, taint=taint)
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    if entry is not None and whole and not recorder.is_stored(tensor):
        return entry.value.to(kwargs.get("dtype") or entry.value.dtype).clone()
    if entry is None:
        values.assume("host-copy", "a copy to the host of an unknown value is not followed")
    there = {**kwargs, "device": META}
    out: Tensor = func(*args, **there)
    if out.dtype == tensor.dtype:
        recorder.same_as(out, tensor)
    else:
        recorder.record(func, args, there, [out], single=True)
    if entry is not None and small(tensor):
        values.learn(out, entry.value.to(out.dtype).clone(), entry.taint)
    return out


def _into_host(recorder: Recorder, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    """A copy into a tensor of the host: what it holds from here on, if known."""
    target: Tensor = args[0]
    entry = recorder.values.known(args[1])
    taint = entry.taint if entry is not None else frozenset()
    if entry is not None:
        target.copy_(entry.value)
        recorder.record(_READ, (args[1],), {}, [], sync=True, taint=taint)
        return target
    recorder.values.assume("host-copy", "a copy to the host of an unknown value is not followed")
    recorder.record(func, args, kwargs, [target], single=True)
    return target


def _jagged(recorder: Recorder, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    """Rows of a padded tensor [B, S, ...] that offsets name, [L, ...]; L is given or in them."""
    padded, offsets, *rest = args
    rows = rest[0] if rest else kwargs.get("total_L")
    taint: frozenset[int] = frozenset()
    if rows is None:
        ends, taint = recorder.values.value_of(offsets[0], "the rows of a jagged tensor")
        rows = ends.reshape(-1)[-1].item()
    out = torch.empty((int(rows), *padded.shape[2:]), dtype=padded.dtype, device=META)
    recorder.record(func, args, kwargs, [out], single=True, taint=taint)
    return out


def _suppressed(recorder: Recorder, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    values = recorder.values
    boxes, scores = (values.known(t) or values.from_data(t) for t in args[:2])
    if boxes is not None and scores is not None and not boxes.taint | scores.taint:
        kept = _lifted(values, func(boxes.value, scores.value, *args[2:], **kwargs), frozenset())
        recorder.record(func, args, kwargs, [kept], single=True)
        return kept
    count = max(1, args[0].shape[0] // 2)
    taint = frozenset(
        [recorder.values.assume("nms", "non-maximum suppression keeps half of the boxes", count)]
    )
    out = _lifted(recorder.values, torch.arange(count), taint)
    recorder.record(func, args, kwargs, [out], single=True, taint=taint)
    return out


def _unscaled(recorder: Recorder, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    """A loss scaler's look for infinite gradients finds none, so that its step is taken."""
    func(*args, **kwargs)
    for gradient in args[0]:
        recorder.values.forget(gradient)
    text = "all gradients are finite: the scaled step is taken"
    taint = frozenset([recorder.values.assume("value", text, 0)])
    recorder.record(func, args, kwargs, [], taint=taint)
    recorder.values.forget(args[1])
    recorder.values.learn(args[1], torch.zeros(tuple(args[1].shape)), taint)


def route(
    values: Values,
    func: Any,
    name: str,
    args: Any,
    kwargs: Mapping[str, Any],
    source: Tensor,
    index: Tensor,
    position: int,
) -> frozenset[int]:
    """Balanced values for the indices that topk, argmax, sort ... make of unknown scores."""
    if index.dtype.is_floating_point:
        return frozenset()
    if values.decision("balanced-routing") is None and _as_the_data_chooses(
        values, func, name, args, kwargs, index, position
    ):
        return frozenset()
    schema = [a.name for a in func._schema.arguments]
    dimension = None
    if "dim" in schema:
        position = schema.index("dim")
        dimension = kwargs.get("dim", args[position] if position < len(args) else None)
    along = -1 if dimension is None else int(dimension)
    routed = values.route(name, source, index, along, sorts="descending" in schema)
    return frozenset() if routed is None else frozenset([routed])


def _as_the_data_chooses(
    values: Values,
    func: Any,
    name: str,
    args: Any,
    kwargs: Mapping[str, Any],
    index: Tensor,
    position: int,
) -> bool:
    """Learn the indices that the real tensors give, where they do; that is put on record."""
    if index.numel() > MAX_INTEGERS:
        return False
    tensors = listed(args)
    entries = {}
    for tensor in tensors:
        entry = values.known(tensor)
        value = values.compute(tensor) if entry is None else entry.value
        if value is None or (entry is not None and entry.taint):
            return False
        entries[id(tensor)] = value
    given, named = tree_map_only(Tensor, lambda t: entries[id(t)], (tuple(args), dict(kwargs)))
    with _disable_current_modes(), torch.no_grad():
        try:
            chosen = listed(run_on_cpu(name, func, list(given), named))[position]
        except (NotImplementedError, RuntimeError):  # no kernel for a CPU, or not for these types
            return False
    values.computed += 1
    values.learn(index, chosen)
    values.assume("data-routing", f"{name} chooses as the given weights and inputs do")
    return True


# -- counts that a cost rule needs and only known values give ------------------------------------

_FLEX = frozenset({"rooftrace.flex_attention", "rooftrace.flex_attention_backward"})
_GATHERS = {"aten.embedding": 1, "aten.index_select": 2}
"""Where the indices of gathers by row stand."""
_MASK_POSITION = {"rooftrace.attention": 3, "rooftrace.attention_backward": 4}
"""Where attention has its mask; query and key stand three and two places before it."""


def learn_facts(
    values: Values, name: str, args: Any, tensors: list[Tensor], facts: dict[str, Any]
) -> frozenset[int]:
    """Add rows_touched, groups_touched, mask ... to `facts`; returns what they rest on.

    Raises IndexError for known indices outside of what they point into, as a CPU does.
    """
    _check_range(values, name, args)
    if name in _GATHERS:
        entry = values.known(args[_GATHERS[name]])
        if entry is not None:
            facts.update(values.once(entry.value, ("rows",), _distinct))
    elif name == "aten.index" and len(args[1]) == 1 and isinstance(args[1][0], Tensor):
        entry = values.known(args[1][0])
        if entry is not None and entry.value.numel() > 1:
            facts.update(values.once(entry.value, ("rows",), _distinct))
    elif name in _GROUPED_PRODUCTS:
        offsets = next((t for t in tensors if t.dtype == torch.int32 and t.dim() == 1), None)
        entry = values.known(offsets) if offsets is not None else None
        if entry is not None:
            sizes = torch.diff(entry.value, prepend=entry.value.new_zeros(1))
            facts["groups_touched"] = int((sizes > 0).sum())
            facts["rows_largest"] = int(sizes.max()) if sizes.numel() else 0
            facts["rows_routed"] = int(sizes.sum())
    elif name in _FLEX:
        pairs, mask = args[-2:]
        facts.update({"mask": mask} if pairs is None else {"mask": mask, "visible_pairs": pairs})
        return frozenset()
    elif name in _PACKED_ATTENTION and len(args) > _PACKED_ATTENTION[name]:
        offsets = args[_PACKED_ATTENTION[name]]
        entry = values.known(offsets) if isinstance(offsets, Tensor) else None
        if isinstance(offsets, Tensor) and (entry is None or not _equal_steps(entry.value)):
            text = "attention over packed sequences counts them as equally long"
            return frozenset([values.assume("lengths", text)])
    elif name in _MASK_POSITION and args[_MASK_POSITION[name]] is not None:
        position = _MASK_POSITION[name]
        query, key, mask = args[position - 3], args[position - 2], args[position]
        entry = values.known(mask)
        if entry is None or entry.value.dim() < 2:
            return frozenset()
        rows, columns = query.shape[-2], key.shape[-2]
        facts.update(
            values.once(entry.value, (rows, columns), lambda mask: _mask_facts(mask, rows, columns))
        )
    else:
        sparse = next((t for t in tensors if t.layout is not torch.strided), None)
        if sparse is not None and sparse._nnz():  # what `to_sparse` makes on meta has none
            facts["stored"] = pieces_of(sparse)[-1].numel()
        return frozenset()
    return entry.taint if entry is not None else frozenset()


def _check_range(values: Values, name: str, args: Any) -> None:
    if name == "aten.index":
        places = [(i, args[0].shape[n], True) for n, i in enumerate(args[1]) if i is not None]
    elif name == "aten.embedding":
        places = [(args[1], args[0].shape[0], False)]
    elif name in ("aten.index_select", "aten.gather"):
        places = [(args[2], args[0].shape[args[1]] if args[0].dim() else 1, False)]
    else:
        return
    for index, size, negative in places:
        entry = values.known(index)
        if entry is None or entry.taint or not entry.value.numel() or _is_mask(entry.value):
            continue
        least, most = values.once(entry.value, ("range",), _range)
        if least < (-size if negative else 0) or most >= size:
            wrong = most if most >= size else least
            raise IndexError(f"index out of range in self: {wrong} of {size} rows ({name})")


def _range(index: Tensor) -> tuple[int, int]:
    least, most = index.aminmax()
    return int(least), int(most)


_PACKED_ATTENTION = {"aten._flash_attention_forward": 3, "aten._flash_attention_backward": 6}
"""Where the offsets of the sequences stand."""


def _equal_steps(offsets: Tensor) -> bool:
    steps = offsets.diff()
    return bool((steps == steps[:1]).all())


def _distinct(index: Tensor) -> dict[str, Any]:
    return {"rows_touched": int(torch.unique(index).numel())}


def _mask_facts(mask: Tensor, rows: int, columns: int) -> dict[str, Any]:
    """How many (query, key) pairs of one head a mask leaves visible, and its kind."""
    visible = mask if mask.dtype == torch.bool else mask > _MASKED
    leading = visible.shape[:-2]
    shown_rows, shown_columns = visible.shape[-2:]  # 1 where it is the same for all
    pairs = int(visible.sum()) * (rows // shown_rows) * (columns // shown_columns)
    return {"visible_pairs": pairs // max(1, leading.numel()), "mask": classify(visible)}


def classify(visible: Tensor) -> str:
    """What a boolean mask [..., S, L] hides: none, causal, sliding-window, padding or full."""
    if bool(visible.all()):
        return "none"
    plane = visible.reshape(-1, *visible.shape[-2:])[0]
    rows, columns = plane.shape
    shift = columns - rows
    causal = torch.ones(rows, columns, dtype=torch.bool).tril(shift)
    if torch.equal(plane, causal):
        return "causal"
    if bool((plane & ~causal).any()):
        same = bool((plane == plane[:1]).all())
        return "padding" if same else "full"
    window = int(plane.sum(1).max())
    band = causal & ~torch.ones(rows, columns, dtype=torch.bool).tril(shift - window)
    return "sliding-window" if torch.equal(plane, band) else "full"


# -- ops that meta cannot run --------------------------------------------------------------------


_SAME = {"aten.eq.Tensor": True, "aten.ne.Tensor": False}
"""Of a number and itself: nan alone differs."""
_INFINITE = {"aten.ne.Scalar": True, "aten.eq.Scalar": False}
"""Of a number and infinity."""
_TESTS = {"aten.isfinite": True, "aten.isnan": False, "aten.isinf": False}
_BOTH = ("aten.mul", "aten.logical_and", "aten.bitwise_and")
_EITHER = ("aten.logical_or", "aten.bitwise_or")
_NOT = ("aten.logical_not", "aten.bitwise_not")
_KEEPS = frozenset(
    f"aten.{name}"
    for name in ("all", "any", "view", "reshape", "_to_copy", "clone", "alias", "detach", "stack")
)


def of_finite_numbers(node: fx.Node, depth: int = 16) -> bool | None:
    """What a test for inf and nan (isfinite, isnan and what is made of them) gives for numbers that
    are finite; None where a recorded op is no such test."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or not node.args or not depth:
        return None
    name = f"{target.namespace}.{target._opname}"
    first, second = node.args[0], node.args[1] if len(node.args) > 1 else None
    if name in _TESTS:
        return _TESTS[name]
    if str(target) in _SAME and first is second:
        return _SAME[str(target)]
    if str(target) in _INFINITE and isinstance(second, float) and math.isinf(second):
        return _INFINITE[str(target)]
    parts = (first, second) if name in _BOTH + _EITHER else (first,)
    if name not in _KEEPS and name not in _NOT and name not in _BOTH + _EITHER:
        return None
    if isinstance(first, (list, tuple)):
        parts = tuple(first)
    found = [of_finite_numbers(p, depth - 1) if isinstance(p, fx.Node) else None for p in parts]
    if not found or None in found:
        return None
    if name in _NOT:
        return not found[0]
    some = name in _EITHER or name == "aten.any"
    return any(found) if some else all(found)


def off_host(
    recorder: Recorder,
    func: Any,
    info: OpInfo,
    args: Any,
    kwargs: Mapping[str, Any],
    tensors: list[Tensor],
    out: Any,
) -> Any:
    """`out`, on meta: some kernels (solve_triangular) answer where a stray CPU tensor is."""
    if info.mutated or info.may_alias or "device" in kwargs:
        return out
    outputs = listed(out)
    if len({t.device.type for t in tensors}) < 2 or any(t.device == META for t in outputs):
        return out
    moved = tree_map_only(Tensor, lambda t: _off_host(recorder, t), (args, dict(kwargs)))
    return func(*moved[0], **moved[1]) if outputs else out


def without_meta_kernel(
    recorder: Recorder,
    func: Any,
    info: OpInfo,
    args: Any,
    kwargs: Mapping[str, Any],
    tensors: list[Tensor],
    error: Exception,
) -> Any:
    """The outputs of an op that meta refused.

    In order: stray CPU tensors to meta, a precision that meta knows, a decomposition, a run on CPU
    zeros, "writes in place", "like its first input".  Raises `error` where it was the user's.
    """
    if {"cpu", "meta"} <= {t.device.type for t in tensors}:
        moved = tree_map_only(Tensor, lambda t: _off_host(recorder, t), (args, dict(kwargs)))
        with contextlib.suppress(*_REFUSED):
            return func(*moved[0], **moved[1])
    if info.name in _GROUPED_PRODUCTS:
        with contextlib.suppress(*_REFUSED):
            return _in_bf16(func, args, kwargs)
    if str(func) in _TYPED_SUMS:
        with contextlib.suppress(*_REFUSED):
            return _with_type(func, *args)
    if any(t.layout is not torch.strided for t in tensors):
        with contextlib.suppress(*_REFUSED):  # a sum or product has the sizes of the dense one
            return _as_dense(func, args, kwargs)
    if recorder.packed and not info.mutated and isinstance(error, RuntimeError):
        with contextlib.suppress(*_REFUSED):
            return _on_quantised(func, args, kwargs, tensors)
    if not isinstance(error, NotImplementedError) and _NO_FAKE not in str(error):
        raise error
    with contextlib.suppress(*_REFUSED):
        result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    values = recorder.values
    if info.mutated:
        values.assume("shape", f"{info.name} has no meta kernel: taken as writing in place")
        written = info.written(args, kwargs)
        return written[0] if func._schema.returns and written else None
    if sum(t.numel() for t in tensors) <= _MAX_ZEROS:
        zeros = tree_map_only(
            Tensor, lambda t: torch.zeros(tuple(t.shape), dtype=t.dtype), (args, dict(kwargs))
        )
        with contextlib.suppress(*_REFUSED):
            result = func(*zeros[0], **zeros[1])
            values.assume(
                "shape",
                f"{info.name} has no meta kernel: its output shape is that of a run on zeros",
            )
            return tree_map_only(Tensor, lambda t: torch.empty_like(t, device=META), result)
    if not tensors:
        raise error
    values.assume(
        "shape", f"{info.name} has no meta kernel: its outputs are taken to be like its first input"
    )
    results = tuple(torch.empty_like(tensors[0], device=META) for _ in func._schema.returns)
    return results[0] if len(results) == 1 else results


def _off_host(recorder: Recorder, tensor: Tensor) -> Tensor:
    """A meta tensor for a CPU tensor that met meta tensors; the graph reads it as a constant."""
    if tensor.device.type != "cpu":
        return tensor
    moved = torch.empty_like(tensor, device=META)
    if recorder.recording:
        recorder.node_of(tensor)
        recorder.same_as(moved, tensor)
    if small(tensor):
        recorder.values.learn(moved, tensor.detach())
    return moved


def _on_quantised(func: Any, args: Any, kwargs: Mapping[str, Any], tensors: list[Tensor]) -> Any:
    """An op of floats (a mean, a pooling) on quantised values, which are their integers on meta."""
    stored = {t.dtype for t in tensors} & {torch.uint8, torch.int8}
    if len(stored) != 1:
        raise TypeError("no quantised values of one type")
    dtype = stored.pop()
    floats = tree_map_only(
        Tensor, lambda t: t.float() if t.dtype == dtype else t, (args, dict(kwargs))
    )
    return tree_map_only(Tensor, lambda t: t.to(dtype), func(*floats[0], **floats[1]))


def _in_bf16(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    """A grouped product of another precision: devices run it, its meta kernel knows bf16 only."""
    narrow = tree_map_only(
        Tensor,
        lambda t: torch.empty_like(t, dtype=torch.bfloat16) if t.is_floating_point() else t,
        (args, dict(kwargs)),
    )
    return torch.empty_like(func(*narrow[0], **narrow[1]), dtype=args[0].dtype)


def _as_dense(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """An op on dense tensors in place of sparse ones, where its result is dense then too."""

    def dense(tensor: Tensor) -> Tensor:
        strided = tensor.layout is torch.strided
        return tensor if strided else torch.empty(tensor.shape, dtype=tensor.dtype, device=META)

    if all(t.layout is not torch.strided for t in listed((args, list(kwargs.values())))):
        raise NotImplementedError  # of sparse tensors alone it would be sparse
    given, named = tree_map_only(Tensor, dense, (tuple(args), dict(kwargs)))
    return func(*given, **named)


def _with_type(func: Any, added: Tensor, first: Tensor, second: Tensor, dtype: Any) -> Tensor:
    """The sum of a tensor and a product, in the type that was asked for."""
    plain = func.overloadpacket.default
    return torch.empty_like(
        plain(torch.empty_like(added, dtype=first.dtype), first, second), dtype=dtype
    )


def higher_order(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """cond takes one path, loops go round while they are known to; others are not looked into."""
    name = func.name() if callable(getattr(func, "name", None)) else str(func)
    with recorder.again():
        if name == "cond":
            condition, when_true, when_false, operands = args[:4]
            if isinstance(condition, Tensor):
                condition = bool(condition.item())
            return (when_true if condition else when_false)(*operands)
        if name == "while_loop":
            return _looped(recorder, *args)
        if name == "scan":
            combine, start, rows, *more = args
            run: Any = generic_scan
            return run(combine, start, rows, additional_inputs=tuple(*more))
        if name == "invoke_subgraph":
            return args[0](*args[2:])
        if name == "out_dtype":
            return _with_wide_sums(*args)
    recorder.values.assume("higher-order", f"what {name} runs inside is not recorded")
    return func(*args, **kwargs)


def _with_wide_sums(op: Any, dtype: torch.dtype, *args: Any) -> Any:
    """An op that sums in another type: a GPU has a kernel for int8 products with int32 sums."""
    tensors = listed(args)
    small_integers = all(t.dtype == torch.int8 for t in tensors)
    if op is torch.ops.aten.mm.default and dtype == torch.int32 and small_integers:
        return torch._int_mm(*args)
    return op(*tree_map_only(Tensor, lambda t: t.to(dtype), args))


def _looped(recorder: Recorder, condition: Any, body: Any, carried: Any, more: Any = ()) -> Any:
    """Where the condition rests on unknown values the body runs once."""
    for turn in range(_MAX_LOOPS):
        go_on = condition(*carried, *more)
        values = recorder.values
        entry = None
        if isinstance(go_on, Tensor):
            entry = values.known(go_on) or values.from_data(go_on)
        if isinstance(go_on, Tensor) and entry is None:
            values.assume("branch", "while_loop runs its body once", 1)
            return body(*carried, *more) if turn == 0 else carried
        if not (go_on if entry is None else bool(entry.value)):
            break
        carried = body(*carried, *more)
    return carried
