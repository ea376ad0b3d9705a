"""Findings: lines of the user's code that a small change makes faster, as edits of a graph.

Each is read off the captured graph; its edit makes the graph of the mended code: the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from rooftrace.costmodels.fusion.traffic import has_channels_last, weight_shape
from rooftrace.costmodels.ops import find_rule
from rooftrace.costmodels.ops.cost import UNFUSED
from rooftrace.costmodels.rewrites.dataflow import ValueFlow
from rooftrace.costmodels.rewrites.editing import (
    ATTENTION,
    ATTENTION_BACKWARD,
    Editor,
    operand,
    released,
    without_left_behind,
)
from rooftrace.graph import Argument, Op, OpGraph, Ref, Tensor, refs
from rooftrace.hardware.precisions import precision
from rooftrace.hardware.units import listed, plural

Edit = Callable[[OpGraph], OpGraph]
"""The graph of the mended code; the same graph where there is nothing to mend."""


class Mend(NamedTuple):
    """A change of the code: what to do, what that needs, and the graph of the mended code."""

    lever: str
    action: str
    needs: str
    edit: Edit
    at_most: bool = False


def findings(graph: OpGraph, load: int, compiled: bool) -> Iterator[Mend]:
    """Every finding of a captured graph; whether it is worth anything is for prices to say.

    load: bytes that a thread loads at once, where rows begin at multiples of that.  compiled:
    whether a compiler makes one kernel of the optimizer already.
    """
    if any(_is_unfused(op) for op in graph.ops):
        yield Mend(
            "layout",
            "Make the width of query, key and value their innermost dimension (.contiguous())",
            "a copy of each, which is counted; attention then has a kernel of its own",
            with_contiguous_attention,
        )
    if any(_is_image_first(graph, op) for op in graph.ops):
        yield Mend(
            "layout",
            "Lay images out with channels last (memory_format=torch.channels_last)",
            "the module and its inputs in this layout",
            with_channels_last,
        )
    if odd := odd_sizes(graph, load):
        told = listed([f"{size:,} to {wide:,}" for size, wide in odd.items()])
        yield Mend(
            "padding",
            f"Pad {told}, so that rows begin at multiples of {load} bytes",
            "rows of zeros in these weights, and what reads their results to leave them out",
            lambda graph: with_sizes(graph, odd),
        )
    if not compiled and _moments(graph):
        yield Mend(
            "optimizer",
            "Update the weights in one fused kernel (fused=True of the optimizer)",
            "all parameters on the GPU",
            with_fused_optimizer,
        )
    waiting = [op for op in graph.ops if op.kind == "sync"]
    if waiting:
        count = plural(sum(map(graph.times, waiting)), "wait")
        yield Mend(
            "wait",
            f"Keep values on the device: {count} for them in the step (.item())",
            "code that goes on with the tensor in place of the number",
            without_waits,
        )
    if needless_copies(graph):
        yield Mend(
            "copy",
            "Leave out copies whose readers take the original as well",
            "nothing that writes into either of them",
            without_copies,
        )


# -- attention on the math path --------------------------------------------------------------------

_WIDTH = "the width of an operand"
"""How the reason begins for which CUDA has no kernel (`recording.library.why_math`)."""


def _is_unfused(op: Op) -> bool:
    return str(op.facts.get(UNFUSED, "")).startswith(_WIDTH)


class _Apart(NamedTuple):
    """Attention that runs as products: its ops forward and backward, and what they read and make.

    grads: those of query, key and value, in this order.
    """

    forward: tuple[Op, ...]
    operands: tuple[Ref, Ref, Ref]
    out: int
    is_causal: bool
    backward: tuple[Op, ...] = ()
    grad_out: Ref | None = None
    grads: tuple[int, ...] = ()


def with_contiguous_attention(graph: OpGraph) -> OpGraph:
    """Attention of operands whose width is not innermost becomes copies of them, and a kernel."""
    flow = ValueFlow(graph)
    apart = [match for op in graph.ops if _is_unfused(op) if (match := _apart(flow, op))]
    firsts = {match.forward[-1].id: match for match in apart}
    lasts = {match.backward[-1].id: match for match in apart if match.backward}
    gone = {op.id for match in apart for op in (*match.forward, *match.backward)}
    edit, made = Editor(graph), dict[int, tuple[Ref, ...]]()
    for op in graph.ops:
        if match := firsts.get(op.id):
            made[match.out] = _emit_forward(edit, match)
        elif match := lasts.get(op.id):
            _emit_backward(edit, match, made[match.out])
        elif op.id not in gone:
            edit.ops.append(op)
    return released(without_left_behind(edit.done(), graph), graph).verify()


def _apart(flow: ValueFlow, softmax: Op) -> _Apart | None:
    """The attention around a softmax; None where its ops are not all known."""
    graph = flow.graph
    where = softmax.source, softmax.module, softmax.call, softmax.repeats
    alike = [op for op in graph.ops if (op.source, op.module, op.call, op.repeats) == where]
    forward = [op for op in alike if op.part == softmax.part and op.function == softmax.function]
    inner = {value for op in forward for value in op.outputs}
    products = [op for op in forward if op.name == "aten.bmm"]
    if len(products) != 2 or any(ref.then for op in forward for ref in op.reads):
        return None
    starts = [_start(flow, operand(products[n], name), inner) for n, name in _OPERANDS]
    if len({graph.values[ref.id].dtype for ref in starts}) != 1:
        return None
    outside = {v for op in forward for v in op.inputs} - inner - {ref.id for ref in starts}
    out = forward[-1].outputs[0]
    if outside or len(graph.values[out].shape) < 3:
        return None  # a mask of the caller's
    causal = any(op.name == "aten.tril" for op in forward)
    match = _Apart(tuple(forward), (starts[0], starts[1], starts[2]), out, causal)
    later = [op for op in alike if op.part == "backward"]
    return _with_backward(flow, match, later, inner) if later else match


_OPERANDS = ((0, "self"), (0, "mat2"), (1, "mat2"))


def _start(flow: ValueFlow, ref: Ref, inner: set[int]) -> Ref:
    """The operand of attention that an operand of its products is made of."""
    while ref.id in inner:
        op = flow.producer(ref.id)
        assert op is not None
        ref = op.reads[0]
    return ref


def _with_backward(
    flow: ValueFlow, match: _Apart, later: Sequence[Op], inner: set[int]
) -> _Apart | None:
    """The attention with the ops of its backward; None where these are not all known."""
    values, out = flow.values, flow.values[match.out]
    start = next((op for op in later if not inner.isdisjoint(op.inputs)), None)
    if start is None:
        return None
    made, backward = set[int](), list[Op]()
    for op in later:  # from the gradient in the shape of the result on
        reads = {value for value in op.inputs if value not in inner}
        is_grad = any((values[v].shape, values[v].dtype) == (out.shape, out.dtype) for v in reads)
        if made & reads or not inner.isdisjoint(op.inputs) or (is_grad and not backward):
            backward.append(op)
            made.update(op.outputs)
    reads = {v for op in backward for v in op.inputs} - made - inner
    used = {v for v in made for op in flow.users.get(v, ()) if op not in backward}
    used |= made & set(flow.graph.outputs)
    grads = sorted(used)
    sizes = [values[ref.id].elements for ref in match.operands]
    if len(reads) != 1 or sorted(values[v].elements for v in grads) != sorted(sizes):
        return None
    in_order = []
    for size in sizes:
        in_order.append(next(v for v in grads if values[v].elements == size))
        grads.remove(in_order[-1])
    return match._replace(
        backward=tuple(backward), grad_out=Ref(reads.pop()), grads=tuple(in_order)
    )


def _emit_forward(edit: Editor, match: _Apart) -> tuple[Ref, ...]:
    """Copies of the operands and the kernel; returns what backward reads of them."""
    like = match.forward[-1]
    copies = []
    for ref in match.operands:
        tensor = edit.values[ref.id]
        if tensor.stride[-1] == 1:
            copies.append(ref)
            continue
        copy = edit.made(like, "aten.clone.default", {"self": ref}, tensor.shape, tensor.dtype)
        copies.append(copy)
    shape = edit.values[match.out].shape
    by_position = Tensor.contiguous((*shape[:-3], shape[-2], shape[-3], shape[-1]))
    stride = (*by_position[:-3], by_position[-2], by_position[-3], 1)
    edit.values[match.out] = replace(
        edit.values[match.out],
        storage=match.out,
        stride=stride,
        dtype=edit.values[copies[0].id].dtype,
    )
    logsumexp = edit.value(shape[:-1], "fp32", "activations", like.repeats)
    arguments = {**_attention(copies), "is_causal": match.is_causal}
    edit.emit(like, ATTENTION, arguments, (match.out, logsumexp))
    return (*copies, Ref(match.out), Ref(logsumexp))


def _attention(operands: Sequence[Ref]) -> dict[str, Argument]:
    named = dict(zip(("query", "key", "value"), operands, strict=True))
    return {**named, "mask": None, "dropout_p": 0.0}


def _emit_backward(edit: Editor, match: _Apart, kept: tuple[Ref, ...]) -> None:
    assert match.grad_out is not None
    like, (*operands, out, logsumexp) = match.backward[-1], kept
    made = [
        edit.value(t.shape, t.dtype, "gradients", like.repeats)
        for t in (edit.values[ref.id] for ref in operands)
    ]
    empty = edit.value((0,), "fp32", "gradients", like.repeats)
    grad = edit.viewed(like, match.grad_out, edit.values[out.id].shape, edit.values[out.id].stride)
    arguments = {"grad_out": grad, **_attention(operands), "out": out, "logsumexp": logsumexp}
    arguments["is_causal"] = match.is_causal
    edit.emit(like, ATTENTION_BACKWARD, arguments, (*made, empty))
    for value, new in zip(match.grads, made, strict=True):
        edit.becomes(like, value, Ref(new))


# -- layouts of images -----------------------------------------------------------------------------


def _is_image_first(graph: OpGraph, op: Op) -> bool:
    """Whether a convolution over images reads its channels first."""
    if op.kind != "kernel" or op.name != "aten.convolution" or weight_shape(op, graph) is None:
        return False
    image = graph.values[op.inputs[0]]
    return len(image.shape) == 4 and not has_channels_last(image)


_KEEPING = ("convolution", "batch_norm", "pool2d", "upsample", "cat")
"""Parts of names of kernels whose results lie as their images do, beside elementwise ones.

Convolutions follow the weight, too (`cudnn_conv_suggest_memory_format` of ATen's ConvUtils.h).
Group and layer norms make contiguous images of any (`group_norm_kernel.cu`).
"""


def with_channels_last(graph: OpGraph) -> OpGraph:
    """Images and weights of the step lie with channels last, and what kernels make of them.

    Views by other dimensions stay as they are: whether they then need a copy is not known.
    """
    values, turned = list(graph.values), set[int]()

    def turn(value: int) -> None:
        tensor = values[value]
        if len(tensor.shape) == 4 and tensor.stride == Tensor.contiguous(tensor.shape):
            count, channels, height, width = tensor.shape
            step = Tensor.contiguous((count, height, width, channels))
            values[value] = replace(tensor, stride=(step[0], step[3], step[1], step[2]))
            turned.add(value)

    for value in graph.external:
        if graph.values[value].storage == value:
            turn(value)
    for op in graph.ops:
        if op.kind == "view":
            for value in op.outputs:
                alike = [v for v in op.inputs if graph.values[v].stride == values[value].stride]
                if not turned.isdisjoint(alike):
                    turn(value)
        elif not turned.isdisjoint(op.inputs) and _keeps_layout(op):
            for value in op.outputs:
                turn(value)
    return graph.replace(values=tuple(values))


def _keeps_layout(op: Op) -> bool:
    rule = find_rule(op.target)
    pointwise = rule is not None and rule.fusion == "pointwise" and op.name != "aten.clone"
    return pointwise or any(part in op.name for part in _KEEPING)


# -- odd sizes -------------------------------------------------------------------------------------


def odd_sizes(graph: OpGraph, load: int) -> Mapping[int, int]:
    """Sizes of matrices of weights whose rows begin at no multiple of `load` bytes, and padded.

    Rows shorter than that are left alone.
    """
    sizes: dict[int, int] = {}
    for index in graph.external:
        tensor = graph.values[index]
        if tensor.role == "weights" and len(tensor.shape) == 2:
            step = max(1, load * 8 // precision(tensor.dtype).bits)
            sizes |= {n: -(-n // step) * step for n in tensor.shape if n > step and n % step}
    return dict(sorted(sizes.items()))


def with_sizes(graph: OpGraph, sizes: Mapping[int, int]) -> OpGraph:
    """Every dimension of one of these sizes has another one."""

    def sized(item: Argument) -> Argument:
        if isinstance(item, tuple):
            return tuple(map(sized, item))
        return sizes.get(item, item) if type(item) is int else item

    values = []
    for tensor in graph.values:
        shape = tuple(sizes.get(n, n) for n in tensor.shape)
        if shape != tensor.shape:
            order = sorted(range(len(shape)), key=lambda d: (-tensor.stride[d], d))
            steps = dict(zip(order, Tensor.contiguous([shape[d] for d in order]), strict=True))
            stride = tuple(0 if s == 0 else steps[d] for d, s in enumerate(tensor.stride))
            tensor = replace(tensor, shape=shape, stride=stride)
        values.append(tensor)
    ops = [
        replace(op, arguments={name: sized(item) for name, item in op.arguments.items()})
        for op in graph.ops
    ]
    return graph.replace(values=tuple(values), ops=tuple(ops))


# -- optimizers ------------------------------------------------------------------------------------


def _moments(graph: OpGraph) -> dict[str, list[Op]]:
    """Ops of Adam's step that are no single kernel, by name; empty for other optimizers."""
    named: dict[str, list[Op]] = {}
    for op in graph.ops:
        if op.part == "optimizer" and op.kind == "kernel":
            name = op.name.removeprefix("aten.").removeprefix("_foreach_")
            named.setdefault(name, []).append(op)
    if {"lerp_", "addcmul_", "addcdiv_"} <= named.keys():
        return named
    return {}


def with_fused_optimizer(graph: OpGraph) -> OpGraph:
    """The kernels of Adam's step become one for each precision of the parameters."""
    named, values = _moments(graph), graph.values
    gradient, square, moments = {}, {}, {}
    for op in named["lerp_"]:  # the first moment, and the gradient that it moves to
        ends = op.arguments.get("tensors1", op.arguments.get("end"))
        for moment, grad in zip(_tensors(op.arguments["self"]), _tensors(ends), strict=True):
            gradient[values[moment.id].storage] = moment, grad
    for op in named["addcmul_"]:
        ones = op.arguments["tensor1"]
        for moment, grad in zip(_tensors(op.arguments["self"]), _tensors(ones), strict=True):
            square[values[grad.id].storage] = moment
    for op in named["addcdiv_"]:
        firsts = op.arguments["tensor1"]
        for weight, moment in zip(_tensors(op.arguments["self"]), _tensors(firsts), strict=True):
            moments[weight] = values[moment.id].storage
    groups: dict[str, dict[str, tuple[Ref, ...]]] = {}
    for weight, first in moments.items():
        if first not in gradient or values[gradient[first][1].id].storage not in square:
            return graph
        moment, grad = gradient[first]
        row = weight, grad, moment, square[values[grad.id].storage]
        group = groups.setdefault(values[weight.id].dtype, {})
        for name, ref in zip(_LISTS, row, strict=True):
            group[name] = (*group.get(name, ()), ref)
    replaced = {"mul_", "lerp_", "addcmul_", "sqrt", "div_", "add_", "addcdiv_", "div"}
    gone = {op.id for name, ops in named.items() if name in replaced for op in ops}
    last, edit = named["addcdiv_"][-1], Editor(graph)
    for op in graph.ops:
        if op.id == last.id:
            for group in groups.values():
                more: Mapping[str, Any] = {"weight_decay": 0.01 if "mul_" in named else 0.0}
                outputs = tuple(
                    edit.view(ref, values[ref.id].shape, values[ref.id].stride, op.repeats)
                    for ref in group["self"]
                )
                edit.emit(op, "aten._fused_adamw_.default", {**group, **more}, outputs)
        elif op.id not in gone:
            edit.ops.append(op)
    return released(edit.done(), graph).verify()


_LISTS = ("self", "grads", "exp_avgs", "exp_avg_sqs")


def _tensors(item: Argument) -> tuple[Ref, ...]:
    return item if isinstance(item, tuple) else (item,)


# -- waits and copies ------------------------------------------------------------------------------


def without_waits(graph: OpGraph) -> OpGraph:
    """The graph without ops at which the host asks the device for a value."""
    return graph.with_ops(op for op in graph.ops if op.kind != "sync")


_ASKED = frozenset({"contiguous", "clone"})
"""Functions by which the code asks for a copy; reshape and others make one only where they must."""


def needless_copies(graph: OpGraph) -> tuple[Op, ...]:
    """Copies that the code asks for, all of whose readers are elementwise or reduce."""
    flow = ValueFlow(graph)
    return tuple(
        op
        for op in graph.ops
        if op.name == "aten.clone" and op.function in _ASKED and _is_needless(flow, op)
    )


def _is_needless(flow: ValueFlow, copy: Op) -> bool:
    (made,), before = copy.outputs, operand(copy, "self")
    storage = flow.values[made].storage
    if before.then or before.every or made in flow.escaping or flow.writers.get(storage):
        return False
    users = [op for op in flow.storage_users[storage] if op.id != copy.id]
    last = max((op.id for op in users), default=copy.id)
    if not users or flow.overwritten(before.id, copy.id, last):
        return False
    same = flow.values[made].stride == flow.values[before.id].stride
    rules = [find_rule(op.target) for op in users]
    return all(
        made in op.inputs and rule is not None and (same or rule.fusion in _ANY_LAYOUT)
        for op, rule in zip(users, rules, strict=True)
    )


_ANY_LAYOUT = frozenset({"pointwise", "reduction"})


def without_copies(graph: OpGraph) -> OpGraph:
    """The readers of needless copies read the originals; elementwise results lie as these do."""
    copies = needless_copies(graph)
    instead = {op.outputs[0]: operand(op, "self") for op in copies}
    gone = {op.id for op in copies}
    values = list(graph.values)

    def read(item: Argument) -> Argument:
        if isinstance(item, tuple):
            return tuple(map(read, item))
        while isinstance(item, Ref) and item.id in instead:
            item = instead[item.id]
        return item

    ops, moved = list[Op](), set[int]()
    for op in graph.ops:
        if op.id in gone:
            continue
        if any(value in instead or value in moved for value in op.inputs):
            arguments = {name: read(item) for name, item in op.arguments.items()}
            op = replace(op, arguments=arguments, inputs=tuple(refs(arguments)))
            rule = find_rule(op.target)
            for value in op.outputs if rule is not None and rule.fusion == "pointwise" else ():
                made, source = values[value], values[op.inputs[0]]
                if made.shape == source.shape and made.storage == value:
                    values[value] = replace(made, stride=source.stride)
                    moved.add(value)
        ops.append(op)
    return released(graph.with_ops(ops, values=tuple(values)), graph).verify()


# -- memory ----------------------------------------------------------------------------------------


def with_checkpoints(graph: OpGraph) -> OpGraph:
    """Layers keep nothing for backward but their inputs, and run again in front of it.

    A layer is an item of a list of modules.  As `torch.utils.checkpoint` does, it runs again up to
    the last value that backward reads.
    """
    layers: dict[tuple[str, tuple[int, ...]], list[Op]] = {}
    for op in graph.ops:
        path = _layer(op.module)
        if path and op.part == "forward":
            layers.setdefault((path, op.repeats), []).append(op)
    edit, ops = Editor(graph), list(graph.ops)
    again: dict[int, list[Op]] = {}  # before the op of this number
    reads = [ref.then for op in graph.ops for ref in op.reads]
    handed_on = {then.value for then in reads if then is not None}  # to the next iteration
    for forward in layers.values():
        inside = {op.id for op in forward}
        made = (
            {value for op in forward for value in op.outputs}
            - handed_on
            - {
                value
                for op in graph.ops
                if op.part == "forward" and op.id not in inside
                for value in op.inputs
            }
        )
        readers = [
            op for op in graph.ops if op.part == "backward" and not made.isdisjoint(op.inputs)
        ]
        if not readers:
            continue
        saved = {value for op in readers for value in op.inputs} & made
        last = max(op.id for op in forward if not saved.isdisjoint(op.outputs))
        now = _copied(edit, [op for op in forward if op.id <= last], again, readers[0].id)
        for op in readers:
            arguments = {name: _reading(item, now) for name, item in ops[op.id].arguments.items()}
            ops[op.id] = replace(ops[op.id], arguments=arguments, inputs=tuple(refs(arguments)))
        for op in ops:
            if op.holds and op.id not in inside:
                holds = tuple(ref for ref in op.holds if ref.id not in made)
                ops[op.id] = replace(op, holds=holds)
    for op in ops:
        edit.ops += again.get(op.id, ())
        edit.ops.append(op)
    return edit.done().verify()


def layer_lists(graph: OpGraph) -> list[str]:
    """The lists of modules whose items `with_checkpoints` runs again, by their paths."""
    paths = (_layer(op.module) for op in graph.ops if op.part == "forward")
    return sorted({path.rpartition(".")[0] or "the model" for path in paths if path})


def _layer(path: str) -> str:
    """The path of the outermost item of a list of modules that a path leads into; "" for none."""
    parts = path.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def _copied(
    edit: Editor, forward: Sequence[Op], again: dict[int, list[Op]], place: int
) -> dict[int, int]:
    """Put copies of ops in front of an op; the values that they make, by those of the originals."""
    now: dict[int, int] = {}
    for op in forward:
        for value in op.outputs:
            tensor = edit.values[value]
            now[value] = len(edit.values)
            storage = now.get(tensor.storage, tensor.storage)
            edit.values.append(replace(tensor, storage=storage, name="", then=None))
        arguments = {name: _reading(item, now) for name, item in op.arguments.items()}
        again.setdefault(place, []).append(
            replace(
                op,
                part="recompute",
                arguments=arguments,
                inputs=tuple(refs(arguments)),
                outputs=tuple(now[value] for value in op.outputs),
                holds=(),
            )
        )
    return now


def _reading(item: Argument, now: Mapping[int, int]) -> Argument:
    """An argument with other values in place of some; those of neighbours stay."""
    if isinstance(item, tuple):
        return tuple(_reading(part, now) for part in item)
    if isinstance(item, Ref) and item.then is None and item.id in now:
        return replace(item, id=now[item.id])
    return item


SMALLEST = 4096
"""States of fewer numbers stay in 32 bits (`min_8bit_size` of bitsandbytes' optimizers)."""


def with_small_states(graph: OpGraph) -> OpGraph:
    """The states of the optimizer have 8 bits, and one kernel updates all, as in bitsandbytes.

    Its scale for each block of 256 numbers is not counted.
    """
    graph = with_fused_optimizer(graph) if _moments(graph) else graph
    fused = [op for op in graph.ops if op.name.startswith("aten._fused_")]
    states = {value for op in fused for value in refs({n: op.arguments.get(n) for n in _STATES})}
    large = {value for value in states if graph.values[value].elements >= SMALLEST}
    small = [replace(t, dtype="uint8") if t.storage in large else t for t in graph.values]
    return graph.replace(values=tuple(small))


_STATES = ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "momentum_buffer_list", "state_sums")
