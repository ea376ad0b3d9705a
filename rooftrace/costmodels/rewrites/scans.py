"""State-space recurrences as one op: the neighbours that its kernel absorbs, and the op itself.

The axes of all factors are b, t, h, p and n: sequences, tokens, heads, numbers of a head, and of
the state for each of these.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec.structs import replace as changed

from rooftrace.costmodels.rewrites.dataflow import COPIES, ValueFlow, reads_across
from rooftrace.costmodels.rewrites.editing import Editor, operand
from rooftrace.costmodels.rewrites.indexing import Atom, Dim, ReadValue, Walker, named, renamed
from rooftrace.graph import Argument, Op, OpGraph, Ref, Tensor
from rooftrace.hardware.precisions import precision

SELECTIVE_SCAN = "rooftrace.selective_scan.default"
STATE_UPDATE = "rooftrace.selective_state_update.default"
LAYOUTS = {
    "x": "bthp", "dt": "bthp", "A": "hpn", "B": "bthn", "C": "bthn", "D": "hp", "z": "bthp",
    "dt_bias": "hp", "state": "bhpn",
}  # fmt: skip
"""The dimensions of the operands of the ops, in order."""
USUAL_CHUNK = 256
"""Tokens of a chunk where the code has no chunks: `chunk_size` of mamba_ssm's Mamba2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """A recurrence, as the op takes it.

    factors: the operands by name.  y: the result.  last: the state after the last token, where it
    is read.  written: the op that writes it over the state before.  options: softplus, low, high,
    A_log.  chunk: tokens of a chunk.  first: id of the first op of the recurrence.  anchor: the op
    that it replaces.  dropped: ids of ops whose results it makes itself.  inside: of all ops of it.
    """

    dual: bool
    sizes: Mapping[str, int]
    factors: Mapping[str, ReadValue]
    y: ReadValue
    last: ReadValue | None = None
    written: Op | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    chunk: int = USUAL_CHUNK
    first: int = 0
    anchor: Op
    dropped: frozenset[int] = frozenset()
    inside: frozenset[int] = frozenset()


# -- absorbed neighbours --------------------------------------------------------------------------


def finished(walker: Walker, scan: Scan) -> Scan | None:
    """A recurrence with what its kernel absorbs: softplus and bias of dt, D x, the gate.

    None where an operand has other axes than the kernel takes, or is overwritten before it runs.
    """
    scan = _with_ending(walker, _with_decay(walker, _with_steps(walker, scan)))
    scan = _with_last(walker, scan)
    for name, factor in scan.factors.items():
        axes = set(LAYOUTS[name])
        if name == "dt" and scan.factors.get("A") is None:
            axes -= {"p"}
        if not factor.axes <= axes:
            return None
        if name in ("B", "C") and not _whole_groups(factor, scan.sizes["h"]):
            return None
    return scan if _fits(scan) and not _overwritten(walker, scan) else None


def _whole_groups(factor: ReadValue, heads: int) -> bool:
    """Whether heads that share a key are adjacent."""
    digits = [atom for dim in factor.dims for atom in dim.atoms if atom.axis == "h"]
    return all(atom.step * atom.size == heads for atom in digits) and len(digits) <= 1


def _fits(scan: Scan) -> bool:
    """Whether y has each axis once, and in full."""
    atoms = [atom for dim in scan.y.dims for atom in dim.atoms]
    sizes = {axis: n for axis, n in scan.sizes.items() if n > 1 and axis != "n"}
    return {(a.axis, a.step, a.size) for a in atoms} == {(axis, 1, n) for axis, n in sizes.items()}


def _overwritten(walker: Walker, scan: Scan) -> bool:
    """Whether an operand is overwritten between the first op of the recurrence and the anchor."""
    values = walker.values
    operands = {values[f.value].storage for f in scan.factors.values()}
    writers = (op for s in operands for op in walker.writers.get(s, ()))
    return any(scan.first <= op.id < scan.anchor.id for op in writers if op.id not in scan.dropped)


def _with_steps(walker: Walker, scan: Scan) -> Scan:
    """dt before clamp, softplus and a bias, in this order."""
    factor = scan.factors["dt"]
    options: dict[str, Any] = {"softplus": False, "low": None, "high": None, **scan.options}
    clamp = walker.maker(factor.value)
    inner = walker.under(factor, "clamp")
    if clamp is not None and len(inner) == 1:
        options |= {"low": clamp.arguments.get("min"), "high": clamp.arguments.get("max")}
        (factor,) = inner
    inner = walker.under(factor, "softplus", beta=1, threshold=20)
    if inner:
        options["softplus"] = True
        (factor,) = inner
    factors = {**scan.factors, "dt": factor}
    before = options["softplus"] or options["low"] is not None
    sides = walker.under(factor, "add") if before else []
    for bias, other in zip(sides, sides[::-1], strict=True):
        if _stored(walker, bias) and bias.axes <= {"h", "p"} and len(sides) == 2:
            return replace(scan, factors=factors | {"dt": other, "dt_bias": bias}, options=options)
    return replace(scan, factors=factors, options=options)


def _with_decay(walker: Walker, scan: Scan) -> Scan:
    """A = -exp(weight) as the weight: an engine makes A once."""
    made = scan.factors.get("A")
    weight = [] if made is None else walker.under(made, "neg", "exp")
    logs = bool(weight) and _stored(walker, *weight)
    factors = {**scan.factors, **({"A": weight[0]} if logs else {})}
    return replace(scan, factors=factors, options={**scan.options, "A_log": logs})


def _stored(walker: Walker, factor: ReadValue) -> bool:
    return walker.graph.owner(factor.value).role == "weights"


def _with_last(walker: Walker, scan: Scan) -> Scan:
    """The last state as the new cache that it is copied to, if nothing else fills that."""
    readers = [] if scan.last is None else walker.users[scan.last.value]
    blanks = [op for op in readers if op.name == "aten.zeros_like"]
    copies = [op for op in readers if op.name == "aten.copy_"]
    if scan.last is None or len(blanks) != 1 or len(copies) != 1 or len(readers) != 2:
        return scan
    (empty,), (copy,) = blanks, copies
    cache = empty.outputs[0]
    values, outputs = walker.values, walker.graph.outputs
    alike = values[cache].dtype == values[scan.last.value].dtype
    if copy.inputs[0] != cache or walker.users[cache] != [copy] or cache in outputs or not alike:
        return scan
    return replace(
        scan,
        last=ReadValue(copy.outputs[0], scan.last.dims),
        dropped=scan.dropped | {empty.id, copy.id},
    )


def _with_ending(walker: Walker, scan: Scan) -> Scan:
    """y after D x, the gate, casts and slices, as long as nothing else reads it."""
    graph, now = walker.graph, scan.y
    after_last = [] if scan.last is None else walker.users[scan.last.value]
    first = min((op.id for op in after_last if op.id not in scan.inside), default=len(graph.ops))
    while True:
        op = walker.only_reader(now.value)
        if op is None or reads_across(op) or op.repeats != scan.anchor.repeats:
            return scan
        if op.id > first:  # the last state is read before
            return scan
        after = onto(walker, op.outputs[0], now)
        if after is None:
            return scan
        now = after
        more = _absorbed(walker, scan, op, after)
        if more is not None:
            scan = replace(scan, y=after, anchor=op, factors={**scan.factors, **more})
        elif op.name in ("aten.add", "aten.mul", "aten.add_", "aten.mul_"):
            return scan
        elif (
            op.name == "aten._to_copy"
            or _cuts(walker, op)
            or (scan.dual and op.name in COPIES)
            or not _fits(scan)
        ):
            scan = replace(scan, y=after, anchor=op)


def _cuts(walker: Walker, op: Op) -> bool:
    values = walker.values
    return op.name == "aten.slice" and values[op.inputs[0]].shape != values[op.outputs[0]].shape


def onto(walker: Walker, value: int, now: ReadValue) -> ReadValue | None:
    """A value that one op makes of another one, with the axes of the other."""
    fresh = walker.fresh(value)
    op = walker.graph.ops[walker.graph.producers[value]]
    if op.name in ("aten.add", "aten.add_"):
        plain = len(op.inputs) == 2 and op.arguments.get("alpha", 1) == 1
        if not plain or now.value not in op.inputs:
            return None
        names = named(walker.aligned(now.value, fresh.dims), now.dims)
    else:
        names, _ = walker.seen(fresh, now)
    return renamed(fresh, names)


def _absorbed(walker: Walker, scan: Scan, op: Op, after: ReadValue) -> dict[str, ReadValue] | None:
    """D or z, where an op adds D x or multiplies by silu(z)."""
    if len(op.inputs) != 2 or "z" in scan.factors:
        return None
    for value in op.inputs:
        other = walker.source(walker.aligned(value, after.dims))
        if op.name in ("aten.add", "aten.add_") and "D" not in scan.factors:
            parts = [clamped(walker, part) for part in walker.parts(other)]
            x = clamped(walker, scan.factors["x"])
            skips = [part for part in parts if part != x]
            if len(parts) == 2 and len(skips) == 1 and skips[0].axes <= {"h", "p"}:
                return {"D": skips[0]}
        for gate in walker.under(other, "silu") if op.name in ("aten.mul", "aten.mul_") else ():
            if gate.axes == after.axes:
                return {"z": gate}
    return None


def clamped(flow: ValueFlow, factor: ReadValue) -> ReadValue:
    """A factor without padding: digits as long as its dimensions."""
    shape = flow.values[factor.value].shape
    dims = tuple(
        Dim((Atom(d.atoms[0].axis, d.atoms[0].step, min(d.atoms[0].size, n - d.start)),), d.start)
        if len(d.atoms) == 1
        else d
        for n, d in zip(shape, factor.dims, strict=True)
    )
    return ReadValue(factor.value, dims)


_BLANKS = frozenset({"aten.zeros", "aten.zeros_like", "aten.new_zeros"})


def blank(walker: Walker, value: int) -> bool:
    """Whether a value is all zeros: nothing was written into it."""
    op = walker.maker(value)
    return op is not None and op.name in _BLANKS and not walker.changes(value)


# -- the op ----------------------------------------------------------------------------------------


def emit_scan(edit: Editor, scan: Scan) -> None:
    """Emit the kernels of a recurrence, and their results as the values that were read before."""
    like, values, sizes = edit.kernel_for(scan.anchor), edit.values, scan.sizes
    operands: dict[str, Argument] = dict.fromkeys(LAYOUTS)
    for name, factor in scan.factors.items():
        operands[name] = laid_out(edit, like, clamped(edit.flow, factor), LAYOUTS[name])
    out, x = values[scan.y.value], values[scan.factors["x"].value]
    dtype = min(out.dtype, x.dtype, key=lambda name: precision(name).bits)
    order, strides = memory_order(scan.y, out, "bthp")
    layout: dict[str, Argument] = {"order": order, "dtype": f"dtype:{dtype}"}
    shape = tuple(sizes[axis] for axis in "bthp")
    y = edit.value(shape, dtype, out.role, like.repeats, stride=strides)
    wide = "fp64" if x.dtype == "fp64" else "fp32"
    if scan.written is not None and isinstance(operands["state"], Ref):
        state = operands.pop("state")
        old = values[state.id]
        moved = edit.view(state, old.shape, old.stride, like.repeats)
        arguments = {"state": state, **operands, **scan.options, **layout}
        edit.emit(like, STATE_UPDATE, arguments, (moved, y))
        edit.reshape(like, Ref(moved), scan.written.outputs[0])
    else:
        held = tuple(sizes[axis] for axis in "bhpn")
        last = edit.value(held, wide, "activations", like.repeats)
        if scan.dual and sizes["t"] > 1:
            _emit_dual(edit, scan, {**operands, **scan.options}, layout, (y, last, wide))
        else:
            edit.emit(like, SELECTIVE_SCAN, {**operands, **scan.options, **layout}, (y, last))
        if scan.last is not None:
            replaces(edit, like, last, scan.last, "bhpn")
    replaces(edit, like, y, scan.y, "bthp")


def _emit_dual(
    edit: Editor,
    scan: Scan,
    operands: Mapping[str, Argument],
    layout: Mapping[str, Argument],
    results: tuple[int, int, str],
) -> None:
    """Emit the kernels that `mamba_chunk_scan_combined` launches.

    Sums of decays, products and the states of chunks are in fp32, the states that begin the chunks
    in the precision of C.
    """
    like, sizes, (y, last, wide) = edit.kernel_for(scan.anchor), scan.sizes, results
    length = scan.chunk
    count = -(-sizes["t"] // length)
    batch, heads = sizes["b"], sizes["h"]
    by_token = (batch, heads, count, length)

    def made(shape: tuple[int, ...], dtype: str) -> int:
        return edit.value(shape, dtype, "temporary", like.repeats)

    def part(name: str, names: Collection[str], more: Mapping[str, Argument],
             outputs: tuple[int, ...]) -> None:  # fmt: skip
        arguments = {**{n: operands[n] for n in names}, **more}
        edit.emit(like, f"rooftrace.ssd_{name}.default", arguments, outputs)

    steps, sums = made(by_token, wide), made(by_token, wide)
    options = ("dt", "A", "dt_bias", "softplus", "low", "high", "A_log")
    part("steps", options, {"chunk": length}, (steps, sums))
    decays: dict[str, Argument] = {"steps": Ref(steps), "sums": Ref(sums)}
    by_chunk = (batch, count, heads, sizes["p"], sizes["n"])
    states = made(by_chunk, wide)
    part("states", ("x", "B"), decays, (states,))
    keys = edit.values[operands["C"].id]
    begun = made(by_chunk, keys.dtype)
    kept = {"states": Ref(states), "sums": Ref(sums), "state": operands["state"]}
    part("passing", (), {**kept, "dtype": f"dtype:{keys.dtype}"}, (begun, last))
    products = made((batch, count, keys.shape[2], length, length), wide)
    part("products", ("C", "B"), {"chunk": length}, (products,))
    ending = {"products": Ref(products), "begun": Ref(begun), **decays, **layout}
    part("output", ("x", "C", "D", "z"), ending, (y,))


def _digits(factor: ReadValue, stride: Sequence[int]) -> list[tuple[Atom, int]]:
    """The digits of a factor, and the stride of each."""
    digits = []
    for dim, step in zip(factor.dims, stride, strict=True):
        below = math.prod(atom.size for atom in dim.atoms)
        for atom in dim.atoms:
            below //= atom.size
            digits.append((atom, step * below))
    return digits


def memory_order(
    factor: ReadValue, tensor: Tensor, axes: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes of a value in memory, outermost first, and the stride of each."""
    strides = {atom.axis: step for atom, step in reversed(_digits(factor, tensor.stride))}
    outermost = sorted(reversed(strides), key=lambda axis: -strides[axis])
    order = [axis for axis in axes if axis not in strides] + outermost
    return tuple(axes.index(str(axis)) for axis in order), tuple(
        strides.get(axis, 1) for axis in axes
    )


def replaces(edit: Editor, like: Op, made: int, before: ReadValue, axes: str) -> None:
    """Let a value, and its views, be views of a new one; a copy where its precision differs."""
    values = edit.values
    old = values[before.value]
    seen = _arranged(edit, like, Ref(made), before, axes)
    owner = made if old.dtype == values[made].dtype else before.value
    for value in _views(edit.flow, before.value):
        values[value] = changed(values[value], storage=owner)
    if owner == before.value:
        values[owner] = changed(values[owner], stride=Tensor.contiguous(old.shape), then=None)
        cast = {"self": seen, "dtype": f"dtype:{old.dtype}"}
        edit.emit(like, "aten._to_copy.default", cast, (before.value,))
        return
    edit.reshape(like, seen, before.value)


def _arranged(edit: Editor, like: Op, made: Ref, before: ReadValue, axes: str) -> Ref:
    """A value with its dimensions in the order of another one."""
    last = [str(atom.axis) for dim in before.dims for atom in dim.atoms]
    order = tuple(axes.index(a) for a in [*(a for a in axes if a not in last), *last])
    return made if order == tuple(range(len(axes))) else edit.permuted(like, made, order)


def _views(flow: ValueFlow, value: int) -> set[int]:
    """A value and its views."""
    storage, seen, front = flow.values[value].storage, set[int](), [value]
    while front:
        now = front.pop()
        seen.add(now)
        made = (i for op in flow.users[now] for i in op.outputs)
        front += [i for i in made if flow.values[i].storage == storage and i not in seen]
    return seen


def laid_out(edit: Editor, like: Op, factor: ReadValue, axes: Collection[str]) -> Ref:
    """An operand with a dimension for each of these axes, of size 1 where it has no such axis."""
    ref = Ref(factor.value)
    for d, dim in enumerate(factor.dims):
        length = math.prod(atom.size for atom in dim.atoms)
        ref = edit.sliced(like, ref, d, dim.start, dim.start + length)
    tensor = edit.values[ref.id]
    digits = _digits(factor, tensor.stride)
    sizes = tuple(atom.size for atom, _ in digits)
    if sizes != tensor.shape:
        ref = edit.viewed(like, ref, sizes, tuple(step for _, step in digits))
    present = [atom.axis for atom, _ in digits]
    order = tuple(present.index(axis) for axis in axes if axis in present)
    if order != tuple(range(len(order))):
        ref = edit.permuted(like, ref, order)
    layout = {atom.axis: (atom.size, step) for atom, step in reversed(digits)}
    shape, strides = zip(*(layout.get(axis, (1, 1)) for axis in axes), strict=True)
    return ref if edit.values[ref.id].shape == shape else edit.viewed(like, ref, shape, strides)


# -- cells of recurrent layers, called step by step ------------------------------------------------

_CELLS = {
    "lstm_cell": "lstm",
    "gru_cell": "gru",
    "rnn_tanh_cell": "rnn_tanh",
    "rnn_relu_cell": "rnn_relu",
}
"""Functions of torch that take one step, and the mode of the layer that takes all of them."""
_FEW_STEPS = 4


@dataclass(frozen=True, slots=True)
class _Steps:
    """Calls of a cell, each of which reads the state of the one before.

    inputs, states: what the calls read and make, one a call.  first: the state before them.
    """

    mode: str
    inside: frozenset[int]
    inputs: tuple[int, ...]
    states: tuple[int, ...]
    first: Ref
    params: tuple[Ref, ...]


def with_recurrent_layers(graph: OpGraph) -> OpGraph:
    """Cells called step by step become one layer over all steps; the same graph without any."""
    if not any(op.function in _CELLS and op.part == "forward" for op in graph.ops):
        return graph
    flat = graph.expand()
    flow, calls = ValueFlow(flat), dict[tuple[str, str], dict[int, list[Op]]]()
    for op in flat.ops:
        if op.function in _CELLS and op.part == "forward":
            calls.setdefault((op.module, op.function), {}).setdefault(op.call, []).append(op)
    layers = [steps for by in calls.values() if (steps := _steps(flow, [*by.values()]))]
    if not layers or any(op.part == "backward" for op in flat.ops):
        return graph
    edit, firsts = Editor(flat), {min(steps.inside): steps for steps in layers}
    inside = frozenset[int]().union(*(steps.inside for steps in layers))
    rows = dict[tuple[int, ...], int]()
    for op in flat.ops:
        if op.id in firsts:
            rows[firsts[op.id].states] = _emit_layer(edit, op, firsts[op.id])
        if op.id not in inside and not _is_row(edit, op, rows):
            edit.ops.append(op)
    return edit.mended()


def _steps(flow: ValueFlow, calls: Sequence[Sequence[Op]]) -> _Steps | None:
    """The steps of a cell; None where they do not follow one another, or more of them is read."""
    made, inputs, hidden = frozenset[int](), [], []
    weights: dict[int, tuple[Op, Op]] = {}
    for number, ops in enumerate(calls):
        products = [op for op in ops if op.name in ("aten.addmm", "aten.mm")]
        if len(products) != 2:
            return None
        pair = _in_order(flow, products, weights.get(number - 1), made)
        if pair is None:
            return None
        weights[number] = pair
        rows = [operand(op, "mat1" if op.name == "aten.addmm" else "self") for op in pair]
        inputs.append(rows[0].id)
        hidden.append(rows[1].id)
        made = frozenset(value for op in ops for value in op.outputs)
    states = (*hidden[1:], calls[-1][-1].outputs[0])
    inside = frozenset(op.id for ops in calls for op in ops)
    every = {value for ops in calls for op in ops for value in op.outputs} - {*states}
    away = {user.id for value in every for user in flow.users.get(value, ())} - inside
    late = any((by := flow.kernel_of(v)) is not None and by.id > min(inside) for v in inputs)
    if len(calls) < _FEW_STEPS or away or late or not every.isdisjoint(flow.graph.outputs):
        return None
    params = [_unturned(flow, operand(op, "mat2")) for op in weights[0]]
    params += [operand(op, "self") for op in weights[0] if op.name == "aten.addmm"]
    mode = _CELLS[calls[0][0].function]
    return _Steps(mode, inside, tuple(inputs), states, Ref(hidden[0]), tuple(params))


def _in_order(
    flow: ValueFlow, products: Sequence[Op], before: tuple[Op, Op] | None, made: frozenset[int]
) -> tuple[Op, Op] | None:
    """The product of the input and that of the state; None where the state is not the last one."""
    of_state = [not made.isdisjoint(op.inputs) for op in products]
    if before is None:  # all read outside values; those of LSTM have the state first
        reads = products[0].function == "lstm_cell"
        return (products[1], products[0]) if reads else (products[0], products[1])
    if sum(of_state) != 1:
        return None
    state = products[of_state.index(True)]
    other = products[of_state.index(False)]
    same = [_unturned(flow, operand(op, "mat2")) for op in (other, state)]
    last = [_unturned(flow, operand(op, "mat2")) for op in before]
    return (other, state) if same == last else None


def _unturned(flow: ValueFlow, item: Ref) -> Ref:
    """A weight before it was turned."""
    by = flow.producer(item.id)
    return item if by is None or by.kind != "view" else Ref(by.inputs[0])


def _emit_layer(edit: Editor, like: Op, steps: _Steps) -> int:
    """The layer; returns the states of all steps, [T, B, H], of which each step reads its own."""
    first, count = edit.values[steps.inputs[0]], len(steps.inputs)
    shape, gap = (count, *first.shape), edit.flow.distance(steps.inputs)
    if gap is not None:
        stride = (gap, *first.stride)
        whole = edit.view_op(
            like, "aten.as_strided.default", Ref(steps.inputs[0]), {"size": shape}, shape, stride
        )
    else:
        items = {"tensors": tuple(map(Ref, steps.inputs))}
        whole = edit.made(like, "aten.stack.default", items, shape, first.dtype)
    state = edit.values[steps.states[0]]
    out = edit.value((count, *state.shape), state.dtype, "activations", ())
    last = edit.value((1, *state.shape), state.dtype, "activations", ())
    is_lstm = steps.mode == "lstm"
    cell = edit.value((1, *state.shape) if is_lstm else (0,), state.dtype, "activations", ())
    start = edit.viewed(like, steps.first, (1, *state.shape))
    arguments: dict[str, Argument] = {
        "input": whole,
        "hx": (start, start) if is_lstm else (start,),
        "params": steps.params,
        "mode": steps.mode,
        "has_biases": len(steps.params) > 2,
        "num_layers": 1,
        "bidirectional": False,
        "batch_first": False,
    }
    edit.emit(like, "rooftrace.rnn.default", arguments, (out, last, cell))
    for place, value in enumerate(steps.states):
        edit.move(value, out)
        at: dict[str, Argument] = {"self": Ref(out), "dim": 0, "index": place}
        edit.emit(like, "aten.select.int", at, (value,), kind="view")
    return out


def _is_row(edit: Editor, op: Op, rows: Mapping[tuple[int, ...], int]) -> bool:
    """Write a stack of all states as a view of them, or as a copy in another order."""
    items = op.arguments.get("tensors")
    names = tuple(ref.id for ref in items) if isinstance(items, tuple) else ()
    if op.name != "aten.stack" or names not in rows:
        return False
    whole = Ref(rows[names])
    if op.arguments.get("dim", 0) == 0:
        edit.move(op.outputs[0], whole.id)
        edit.emit(op, "aten.alias.default", {"self": whole}, op.outputs, kind="view")
    else:
        edit.emit(op, "aten.clone.default", {"self": whole}, op.outputs)
    return True
