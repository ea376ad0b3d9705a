"""Ops at several places of a step, changed together: attention forward and backward, checkpoints,
loops over tensors, the optimizer, sizes; results that are not all read, and inputs that only grow.

A pass takes a verified OpGraph and returns one; the same where there is nothing to change.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from rooftrace.costmodels.ops.cost import MASK_FACTS
from rooftrace.costmodels.rewrites.attention_kernels import (
    before_copy,
    emit_flash,
    masks_as_numbers,
    share_heads,
)
from rooftrace.costmodels.rewrites.attention_products import WrittenAttention, written_attentions
from rooftrace.costmodels.rewrites.dataflow import (
    BothWays,
    ValueFlow,
    dense,
    dense_like,
    place_of,
    reads_across,
    run_of,
    with_backward,
)
from rooftrace.costmodels.rewrites.editing import (
    ATTENTION,
    ATTENTION_BACKWARD,
    Editor,
    edited,
    operand,
    reading_others,
    released,
    taking,
    without_left_behind,
)
from rooftrace.costmodels.rewrites.fused_products import append_in_place
from rooftrace.costmodels.rewrites.spread import Laid
from rooftrace.costmodels.rewrites.updates import UpdateRow, Updates
from rooftrace.costmodels.rewrites.waste import FEW, key_of
from rooftrace.graph import Argument, Op, OpGraph, Ref, Tensor


def apart(flow: ValueFlow, softmax: Op) -> BothWays | None:
    """The attention around a softmax; None where its ops are not all known."""
    graph = flow.graph
    place = place_of(softmax)
    forward = run_of(
        graph, softmax, lambda op: place_of(op) == place and op.function == softmax.function
    )
    inner = {value for op in forward for value in op.outputs}
    products = [op for op in forward if op.name == "aten.bmm"]
    if len(products) != 2 or any(ref.then for op in forward for ref in op.reads):
        return None
    starts = [_start(flow, operand(products[n], name), inner) for n, name in _OPERANDS]
    if len({graph.values[ref.id].dtype for ref in starts}) != 1:
        return None
    outside = {v for op in forward for v in op.inputs} - inner - {ref.id for ref in starts}
    out = forward[-1].outputs[0]
    if len(outside) > 1 or len(graph.values[out].shape) < 3:
        return None
    mask = Ref(outside.pop()) if outside else None
    causal = any(op.name == "aten.tril" for op in forward)
    operands = starts[0], starts[1], starts[2]
    match = BothWays(tuple(forward), operands, out, causal, mask=mask)
    known = with_backward(flow, match, {place}, inner)
    return None if known is None or known.added or -1 in known.grads else known


_OPERANDS = ((0, "self"), (0, "mat2"), (1, "mat2"))


def _start(flow: ValueFlow, ref: Ref, inner: set[int]) -> Ref:
    """The operand of attention that an operand of its products is made of."""
    while ref.id in inner:
        op = flow.producer(ref.id)
        assert op is not None
        ref = op.reads[0]
    return ref


# -- attention that is one kernel ------------------------------------------------------------------

_TOLD = ("mask", "is_causal", "window", "chunk", "fill", "key", "value")
"""Arguments of attention that its backward has, too."""


def masks_told(graph: OpGraph) -> OpGraph:
    """Masks that a kernel takes as numbers are not read, forward and backward."""
    return _both(graph, masks_as_numbers(graph)[0])


def heads_shared(graph: OpGraph) -> OpGraph:
    """Heads that share keys and values read them as stored; their gradients are summed inside."""
    return _both(graph, share_heads(graph)[0])


def _both(graph: OpGraph, changed: OpGraph) -> OpGraph:
    """The graph whose backward attention reads what its forward attention reads.

    changed: the graph after its forward was changed.  The same graph where a gradient of shared
    keys and values is summed in no known way.
    """
    if changed is graph:
        return graph
    flow, edit = ValueFlow(changed), Editor(changed)
    sums = dict[int, int]()  # by op that adds up gradients of heads, the gradient in its place
    for op in changed.ops:
        if op.target != ATTENTION_BACKWARD:
            continue
        forward = flow.producer(operand(op, "out").id)
        if forward is None or forward.target != ATTENTION:
            return graph
        for name, value in zip(("query", "key", "value"), op.outputs, strict=False):
            now, old = (edit.values[operand(side, name).id] for side in (forward, op))
            if now.shape != old.shape:
                added = _added(flow, value, now.elements)
                if added is None:
                    return graph
                stride = edit.values[value].contiguous(now.shape)
                edit.values[value] = replace(edit.values[value], shape=now.shape, stride=stride)
                sums[added.id] = value
    for op in changed.ops:
        if op.id in sums:
            edit.becomes(op, op.outputs[0], Ref(sums[op.id]))
            continue
        if op.target == ATTENTION_BACKWARD:
            forward = flow.producer(operand(op, "out").id)
            assert forward is not None
            kept = {name: item for name, item in op.arguments.items() if name not in _TOLD}
            told = {name: forward.arguments[name] for name in _TOLD if name in forward.arguments}
            op = taking(op, {**kept, **told})
        edit.ops.append(op)
    done = without_left_behind(edit.done(), graph)
    return released(done, graph).verify()


def _added(flow: ValueFlow, grad: int, elements: int) -> Op | None:
    """The only reader of a gradient, which adds it up over heads that share keys and values."""
    while len(flow.users[grad]) == 1 and grad not in flow.graph.outputs:
        (user,) = flow.users[grad]
        if user.name == "aten.sum":
            return user if flow.values[user.outputs[0]].elements == elements else None
        if user.kind != "view":
            return None
        (grad,) = user.outputs
    return None


def by_which(graph: OpGraph) -> str:
    """The kernel for attention that is written out, in brackets, where not every one can do it."""
    written = written_attentions(graph)
    if any(each.softcap or each.sinks is not None for each in written):
        return " (flex_attention: torch has no other that caps scores or has sinks)"
    return ""


# -- attention that is written out -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Trained:
    """Attention that is written out, and its backward."""

    written: WrittenAttention
    apart: BothWays


def written_attention(graph: OpGraph) -> OpGraph:
    """Attention that is written out, and its backward, become a kernel each."""
    flow = ValueFlow(graph)
    matches = [match for w in written_attentions(graph) if (match := _trained(flow, w)) is not None]
    ends = {match.written.last.id: match for match in matches}
    lasts = {match.apart.backward[-1].id: match for match in matches}
    gone = {op for match in matches for op in match.written.inner}
    gone |= {op.id for match in matches for op in match.apart.backward}
    edit, kernels = Editor(graph), dict[int, Op]()
    strides = dict[int, tuple[int, ...]]()
    for op in graph.ops:
        if match := ends.get(op.id):
            emit_flash(edit, (match.written, None))
            kernel = next(o for o in edit.ops[::-1] if o.target == ATTENTION)
            kernels[match.apart.out], out = kernel, kernel.outputs[0]
            strides[out] = strides_of_attention(edit.values[out].shape)
        elif match := lasts.get(op.id):
            strides |= emit_backward(edit, match.apart, kernels[match.apart.out])
        elif op.id not in gone:
            edit.ops.append(op)
    mended = edit.mended()
    return graph if mended is graph else Laid(_direct(mended, strides), strides).done()


def _direct(graph: OpGraph, sources: Collection[int]) -> OpGraph:
    """Views that have the shape of a source again, through other views, are that source."""
    flow, now = ValueFlow(graph), dict[int, int]()
    for value, tensor in enumerate(graph.values):
        source, shape = tensor.storage, graph.values[tensor.storage].shape
        if (
            source in sources
            and source != value
            and tensor.shape == shape
            and (flow.root_of_shape(value, shape) == source)
        ):
            now[value] = source
    ops = tuple(reading_others(op, now) for op in graph.ops)
    return without_left_behind(graph.replace(ops=ops), graph)


def strides_of_attention(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of attention's result, which its kernels make by position, then by head."""
    rank = len(shape)
    return dense(shape, (*range(rank - 3), rank - 2, rank - 3, rank - 1))


def _trained(flow: ValueFlow, written: WrittenAttention) -> _Trained | None:
    """Hand-written attention with its backward; None where this is not known."""
    ops, last = flow.graph.ops, written.last
    inner = [ops[number] for number in sorted(written.inner)]
    made = {value for op in inner for value in op.outputs}
    starts = written.operands
    where = {place_of(op) for op in (*inner, last)}
    read = made | {ref.id for ref in starts}
    learnt = [written.mask.tensor] if written.mask is not None else []  # a bias, for example
    for operands in (starts, *([(*starts, *learnt)] if learnt else [])):
        match = BothWays((*inner, last), operands, last.outputs[0], False)
        known = with_backward(flow, match, where, read)
        if known is not None:
            break
    if known is None or known.added or -1 in known.grads or not known.backward:
        return None
    away = {op.id for op in (*known.backward, *inner, last)}
    readers = {user.id for value in made for user in flow.users.get(value, ())}
    return _Trained(written, known) if readers <= away else None


def emit_backward(edit: Editor, match: BothWays, kernel: Op) -> dict[int, tuple[int, ...]]:
    """The kernel of the gradients of attention's operands; returns their operands' strides.

    Rows of operands that end in zeros have gradients that are cut.
    """
    assert match.grad_out is not None
    like, values = match.backward[-1], edit.values
    made = list[tuple[int, int, Tensor, bool]]()
    for name, value in zip(OF_ATTENTION, match.grads, strict=False):
        # which of equal sizes is whose makes no difference
        tensor, grad = values[operand(kernel, name).id], values[value]
        *lead, rows, width = range(len(tensor.shape))
        turned = tensor.shape[width], tensor.shape[rows]
        is_turned = grad.shape[-2:] == turned != tensor.shape[-2:]
        order = (*lead, width, rows) if is_turned or grad.stride[-2] == 1 else (*lead, rows, width)
        stride = dense(tensor.shape, order)
        new = edit.value(tensor.shape, grad.dtype, "gradients", like.repeats, stride=stride)
        made.append((value, new, tensor, is_turned))
    out, logsumexp = kernel.outputs
    whole, shape = values[out], values[match.out].shape
    shape = shape if whole.shape[:-1] == shape[:-1] else whole.shape
    grad_out = before_copy(edit, like, match.grad_out, shape, like.id)
    if grad_out is None or values[grad_out.id].stride[-1] != 1:  # no kernel reads rows across
        grad_out = match.grad_out
    if values[grad_out.id].shape != shape:
        grad_out = edit.viewed(like, grad_out, shape)
    if shape != whole.shape:
        grad_out = padded(edit, like, grad_out, whole.shape[-1], "gradients")
    saved: dict[str, Argument] = {"out": Ref(out), "logsumexp": Ref(logsumexp)}
    arguments: dict[str, Argument] = {"grad_out": grad_out, **kernel.arguments, **saved}
    facts = {name: kernel.facts[name] for name in MASK_FACTS if name in kernel.facts}
    news = [new for _, new, _, _ in made]
    if len(news) < len(OF_ATTENTION):  # as ATen: a mask without a gradient has an empty one
        news.append(edit.value((0,), "fp32", "gradients", like.repeats))
    edit.emit(like, ATTENTION_BACKWARD, arguments, (*news,), facts=facts)
    for value, new, tensor, is_turned in made:
        whole_grad, wide = Ref(new), values[value].elements
        if wide != tensor.elements:  # `constant_pad_nd` of less than nothing is a copy
            *lead, _ = tensor.shape
            wide //= math.prod(lead)
            cut = edit.sliced(like, whole_grad, len(lead), 0, wide)
            how: dict[str, Argument] = {"self": cut}
            whole_grad = edit.made(like, COPY, how, (*lead, wide), tensor.dtype, "gradients")
        edit.move(value, whole_grad.id)
        if is_turned:
            *_, rows, last = dims = range(len(tensor.shape))
            whole_grad = edit.permuted(like, whole_grad, (*dims[:-2], last, rows))
        edit.reshape(like, whole_grad, value)
    return {new: dense_like(tensor.shape, tensor.stride) for _, new, tensor, _ in made}


OF_ATTENTION = ("query", "key", "value", "mask")
"""Operands of attention that may have gradients."""
COPY = "aten.clone.default"


def padded(edit: Editor, like: Op, ref: Ref, wide: int, role: str) -> Ref:
    """A value with zeros behind each row, up to a width."""
    tensor = edit.values[ref.id]
    how: dict[str, Argument] = {"self": ref, "pad": (0, wide - tensor.shape[-1])}
    shape = (*tensor.shape[:-1], wide)
    return edit.made(like, "aten.constant_pad_nd.default", how, shape, tensor.dtype, role)


# -- results that are not all read, and inputs that only grow --------------------------------------


def first_of_sorted(graph: OpGraph) -> OpGraph:
    """Sorts of which the first few alone are read look for these (`torch.topk`)."""
    edit, sorts = Editor(graph), False
    for op in graph.ops:
        count = _first_read(edit.flow, op) if op.name == "aten.sort" else 0
        if not count:
            edit.ops.append(op)
            continue
        sorts, dim = True, op.arguments.get("dim", -1)
        for value in op.outputs:
            sizes = list(graph.values[value].shape)
            sizes[dim] = count
            stride = Tensor.contiguous(sizes)
            edit.values[value] = replace(edit.values[value], shape=tuple(sizes), stride=stride)
            for part in (v for user in edit.flow.users[value] for v in user.outputs):
                edit.values[part] = replace(edit.values[part], stride=stride)
        largest = op.arguments.get("descending", False)
        how = {"self": operand(op, "self"), "k": count, "dim": dim, "largest": largest}
        edit.emit(op, "aten.topk.default", how, op.outputs, facts=op.facts)
    return edit.done().verify() if sorts else graph


def _first_read(flow: ValueFlow, sort: Op) -> int:
    """How many of each sorted row are read, from the first on; 0 where that is not known."""
    shape, ends = flow.values[sort.outputs[0]].shape, {0}
    dim = sort.arguments.get("dim", -1) % max(len(shape), 1)
    if {*flow.crossing, *flow.writers, *flow.graph.outputs} & {*sort.outputs}:
        return 0
    for user in (user for value in sort.outputs for user in flow.users[value]):
        along, start, end = (user.arguments.get(name) or 0 for name in ("dim", "start", "end"))
        if user.name != "aten.slice" or along % len(shape) != dim or start or end <= 0:
            return 0
        ends.add(end)
    return max(ends) if max(ends) < shape[dim] else 0


def joined_once(graph: OpGraph) -> OpGraph:
    """A `cat` of a `cat` that nothing else reads takes the tensors of that."""
    edit, pieces = Editor(graph), dict[int, tuple[Ref, ...]]()  # by result of a `cat`
    for op in graph.ops:
        if op.name == "aten.cat" and not reads_across(op) and not op.steps:
            rows = [pieces[r.id] if _is_piece(edit.flow, r.id, op) else (r,) for r in op.reads]
            pieces[op.outputs[0]] = items = tuple(ref for row in rows for ref in row)
            op = taking(op, {**op.arguments, "tensors": items})
        edit.ops.append(op)
    return edit.mended()


def chosen_by_masks(graph: OpGraph) -> OpGraph:
    """Rows that a mask chooses, and that all get one value, are written by `where`.

    An index by a mask looks for its positions first, and the host waits for their number.  So does
    the gradient of the value, whose rows are added up.
    """
    edit, rows = Editor(graph), dict[int, Ref]()  # by rows that a mask took, all rows with zeros
    for op in graph.ops:
        mask = _only_mask(graph, op)
        made = op.outputs[0] if op.outputs else -1
        if mask is not None and op.name.startswith("aten.index_put"):
            how: dict[str, Argument] = {"mask": mask, "value": operand(op, "values")}
            how["self"] = operand(op, "self")
            end = "_" * op.name.endswith("_")
            edit.emit(op, f"aten.masked_fill{end}.Tensor", how, op.outputs)
        elif mask is not None and _is_summed(edit.flow, made):
            source = edit.values[operand(op, "self").id]
            how = {"self": operand(op, "self"), "mask": mask, "value": 0}
            fill = "aten.masked_fill.Scalar"
            whole = edit.made(op, fill, how, source.shape, source.dtype, source.role)
            tail = source.shape[len(edit.values[mask.id].shape) :]
            rows[made] = edit.viewed(op, whole, (source.elements // math.prod(tail), *tail))
        else:
            edit.ops.append(reading_others(op, {old: ref.id for old, ref in rows.items()}))
    return edit.mended()


def _only_mask(graph: OpGraph, op: Op) -> Ref | None:
    """The mask that is the only index of an op, whose values do not differ from row to row."""
    indices = op.arguments.get("indices")
    if not op.name.startswith("aten.index") or not isinstance(indices, tuple) or len(indices) != 1:
        return None
    (mask,) = indices
    if not isinstance(mask, Ref) or graph.values[mask.id].dtype != "bool" or reads_across(op):
        return None
    values = op.arguments.get("values")
    shape = graph.values[operand(op, "self").id].shape[len(graph.values[mask.id].shape) :]
    alike = not isinstance(values, Ref) or len(graph.values[values.id].shape) <= len(shape)
    return mask if alike and not op.arguments.get("accumulate") else None


def _is_summed(flow: ValueFlow, value: int) -> bool:
    """Whether rows are only read by sums over all of them."""
    users = flow.users.get(value, [])
    dims = [user.arguments.get("dim") for user in users if user.name == "aten.sum"]
    return 0 < len(dims) == len(users) and all(dim in ((0,), [0]) for dim in dims)


def framed(graph: OpGraph) -> OpGraph:
    """Parts of a tensor at equal distances, stacked one by one, are a view of it (`unfold`)."""
    flow, edit, strides = ValueFlow(graph), Editor(graph), dict[int, tuple[int, ...]]()
    places = {place_of(op) for op in graph.ops if op.part == "backward"}
    for op in graph.ops:
        stride = None if place_of(op) in places else _stride_of_frames(flow, op)
        if stride is None:
            edit.ops.append(op)
            continue
        strides[op.outputs[0]] = stride
        edit.move(op.outputs[0], graph.values[op.inputs[0]].storage)
        how: dict[str, Argument] = {"self": Ref(op.inputs[0]), "stride": stride}
        edit.emit(op, "aten.as_strided.default", how, op.outputs, kind="view")
    if not strides:
        return graph
    mended = edit.mended()
    return Laid(mended, strides).done()


def _stride_of_frames(flow: ValueFlow, op: Op) -> tuple[int, ...] | None:
    """The strides of what a stack makes, as a view of what its tensors are parts of."""
    if op.name not in ("aten.stack", "aten.cat") or len(op.inputs) < FEW or reads_across(op):
        return None
    first, step, out = flow.location(op.inputs[0]), flow.distance(op.inputs), op.outputs[0]
    if first is None or step is None or step <= 0:
        return None
    if first.storage in flow.writers or out in flow.escaping or out in flow.writers:
        return None
    dim = op.arguments.get("dim", 0) % len(flow.values[out].shape)
    if op.name == "aten.stack":
        return (*first.stride[:dim], step, *first.stride[dim:])
    return (*first.stride[:dim], step, *first.stride[dim + 1 :]) if first.shape[dim] == 1 else None


def _is_piece(flow: ValueFlow, value: int, whole: Op) -> bool:
    """Whether a tensor is a `cat` along the dimension of another one, its only reader."""
    by, rank = flow.producer(value), len(flow.values[value].shape)
    if by is None or by.name != "aten.cat" or reads_across(by) or by.steps:
        return False
    dims = {op.arguments.get("dim", 0) % rank for op in (by, whole)}
    alone = flow.storage_users[value] == [by, whole] and value not in flow.escaping
    return alone and len(dims) == 1 and by.repeats == whole.repeats and by.part == whole.part


def without_unread_gradients(graph: OpGraph) -> OpGraph:
    """Gradients of weights that no optimizer reads are not made, where there is an optimizer."""
    values, ops = graph.values, graph.ops
    read = {values[v].storage for op in ops if op.part == "optimizer" for v in op.inputs}
    made = {v for op in ops if op.part == "backward" for v in op.outputs} & {*graph.outputs}
    unread = {v for v in made if values[v].storage not in read}
    if not read or not unread:
        return graph
    fewer = graph.replace(outputs=tuple(v for v in graph.outputs if v not in unread))
    return released(without_left_behind(fewer, graph), graph)


def with_room(graph: OpGraph) -> OpGraph:
    """Inputs that leave the step longer by `cat`, and are attended to, are written in place."""
    flow, kept, grown = ValueFlow(graph), graph.values, set[int]()
    for op in graph.ops if graph.phase == "forward" else ():
        if op.name != "aten.cat" or op.inputs[0] not in graph.inputs:
            continue
        first, whole = op.inputs[0], op.outputs[0]
        most = 2 * kept[first].elements > kept[whole].elements > kept[first].elements
        readers = {user.target for user in flow.kernels_on(whole)}
        if most and whole in graph.outputs and readers & {ATTENTION, "aten.bmm.default"}:
            grown |= {first, whole}
    if not grown:
        return graph
    caches = [replace(t, role="kv") if v in grown else t for v, t in enumerate(kept)]
    longer, count = append_in_place(graph.replace(values=tuple(caches)))
    roles = zip(longer.values, kept, strict=True)
    values = tuple(replace(tensor, role=old.role) for tensor, old in roles)
    return longer.replace(values=values) if count else graph


# -- a training step -------------------------------------------------------------------------------


_LISTED = ["add", "addcdiv", "addcmul", "copy", "div", "lerp", "mul", "pow", "sqrt", "sub", "zero"]
_LISTS_OF = {f"aten.{name}{end}": f"{name}{end}" for name in _LISTED for end in ("", "_")}
_LISTS_OF["aten.linalg_vector_norm"] = "norm"
"""Ops on a tensor that have a form for lists of tensors, and its name after `_foreach_`."""


def over_lists(graph: OpGraph) -> OpGraph:
    """Equal ops, one tensor after the other by one line of a loop, are one op on lists of them."""
    if graph.phase != "training" or graph.processes > 1:
        return graph
    looped = [op for op in graph.ops if _may_be_of_a_list(op)]
    if not looped:
        return graph
    flat = graph.expand() if any(op.repeats for op in looped) else graph
    flow, groups, place = ValueFlow(flat), dict[Any, list[Op]](), dict[int, int]()
    for op in flat.ops:
        if _may_be_of_a_list(op):
            plain = [(k, key_of(a)) for k, a in op.arguments.items() if type(a) is not Ref]
            groups.setdefault((op.target, op.source, op.part, *sorted(plain)), []).append(op)
    lists = dict[int, list[Op]]()
    for lanes in groups.values():
        if len(lanes) >= FEW and _at_once(flow, lanes, place):
            lists[lanes[0].id] = lanes
            place |= {lane.id: lanes[0].id for lane in lanes}
    changed = edited(flat, lists, _emit_list, place)
    return released(changed, flat).verify() if lists else graph


def _may_be_of_a_list(op: Op) -> bool:
    """Whether an op of the step's own code has a form for a list of tensors."""
    return op.name in _LISTS_OF and not op.module and op.part != "backward"


def _at_once(flow: ValueFlow, lanes: Sequence[Op], place: Mapping[int, int]) -> bool:
    """Whether all lanes can run where the first one does.

    place: by op, the one where it runs now, where that is another one.
    """
    first = lanes[0].id
    written = [flow.values[value].storage for lane in lanes for value in lane.outputs]
    for lane in lanes:
        touched = [*(flow.storage_users[flow.values[v].storage] for v in lane.outputs)]
        touched += [flow.writers.get(flow.values[v].storage, []) for v in lane.inputs]
        touched += [[op] for v in lane.inputs if (op := flow.producer(v)) is not None]
        before = {op.id for ops in touched for op in ops if op.id < lane.id}
        if any(place.get(op, op) >= first for op in before):
            return False
    return len({*written}) == len(lanes)


def _emit_list(edit: Editor, lanes: Sequence[Op]) -> None:
    """The op on the lists of the operands of all lanes; one tensor for all stays one."""
    like, how = lanes[0], dict[str, Argument]()
    for name, item in like.arguments.items():
        column = tuple(lane.arguments[name] for lane in lanes)
        shared = type(item) is not Ref or (name != "self" and len({ref.id for ref in column}) == 1)
        how[name] = item if shared else column
    outputs = tuple(value for lane in lanes for value in lane.outputs)
    name, form = _LISTS_OF[like.name], like.target.rpartition(".")[2]
    edit.emit(like, f"aten._foreach_{name}.{form}", how, outputs, facts=like.facts)


def with_fused_optimizer(graph: OpGraph) -> OpGraph:
    """The kernels of Adam's steps, or of those of SGD with momentum, become one for each precision.

    A step is known by what it does to a few numbers, however it is written.
    """
    if not any(op.part == "optimizer" for op in graph.ops):
        return graph
    whole, steps = graph, [*Updates(graph).rows()]
    if any(graph.ops[op].repeats for row in steps for op in row.ops):
        graph = graph.expand()
        steps = [*Updates(graph).rows()]
    values, groups = graph.values, dict[tuple[str, str], list[UpdateRow]]()
    for row in steps:
        kind = {3: "sgd", 4: "adamw"}[len(row.refs)]
        groups.setdefault((kind, values[row.refs[0].id].dtype), []).append(row)
    gone = {op for rows in groups.values() for row in rows for op in row.ops}
    if len(gone) <= len(groups):
        return whole
    now = {v: values[v].storage for op in gone for v in graph.ops[op].outputs}
    ends = {max(op for row in rows for op in row.ops): key for key, rows in groups.items()}
    edit = Editor(graph)
    for op in graph.ops:
        if op.id not in gone:
            edit.ops.append(reading_others(op, now))
        elif op.id in ends:
            (kind, _), rows = ends[op.id], groups[ends[op.id]]
            columns = zip(*(row.refs for row in rows), strict=True)
            arguments: dict[str, Any] = dict(zip(_LISTS[kind], map(tuple, columns), strict=True))
            for row in rows:
                arguments |= row.options
            outputs = tuple(
                edit.view(ref, values[ref.id].shape, values[ref.id].stride, op.repeats)
                for ref in arguments["self"]
            )
            edit.emit(op, f"aten._fused_{kind}_.default", arguments, outputs)
    return released(edit.done(), graph).verify()


_LISTS = {
    "adamw": ("self", "grads", "exp_avgs", "exp_avg_sqs"),
    "sgd": ("self", "grads", "momentum_buffer_list"),
}
