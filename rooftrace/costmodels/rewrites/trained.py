"""Attention of a training step: its ops forward and backward are changed together.

A pass takes a verified OpGraph and returns one; the same where there is nothing to change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from rooftrace.costmodels.ops.cost import MASK_FACTS
from rooftrace.costmodels.rewrites.attention_kernels import (
    emit_flash,
    masks_as_numbers,
    share_heads,
)
from rooftrace.costmodels.rewrites.attention_products import WrittenAttention, written_attentions
from rooftrace.costmodels.rewrites.dataflow import ValueFlow
from rooftrace.costmodels.rewrites.editing import (
    ATTENTION,
    ATTENTION_BACKWARD,
    Editor,
    operand,
    released,
    without_left_behind,
)
from rooftrace.graph import Argument, Op, OpGraph, Ref, refs


class AttentionApart(NamedTuple):
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


def apart(flow: ValueFlow, softmax: Op) -> AttentionApart | None:
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
    match = AttentionApart(tuple(forward), (starts[0], starts[1], starts[2]), out, causal)
    later = [op for op in alike if op.part == "backward"]
    return with_backward(flow, match, later, inner) if later else match


_OPERANDS = ((0, "self"), (0, "mat2"), (1, "mat2"))


def _start(flow: ValueFlow, ref: Ref, inner: set[int]) -> Ref:
    """The operand of attention that an operand of its products is made of."""
    while ref.id in inner:
        op = flow.producer(ref.id)
        assert op is not None
        ref = op.reads[0]
    return ref


def with_backward(
    flow: ValueFlow, match: AttentionApart, later: Sequence[Op], inner: set[int]
) -> AttentionApart | None:
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
    reads = {v for v in reads if (by := flow.producer(v)) is None or by.part == "backward"}
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
            arguments: dict[str, Argument] = {**kept, **told}
            op = replace(op, arguments=arguments, inputs=tuple(refs(arguments)))
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


# -- attention that is written out -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Trained:
    """Attention that is written out, and its backward."""

    written: WrittenAttention
    apart: AttentionApart


def written_attention(graph: OpGraph) -> OpGraph:
    """Attention that is written out, and its backward, become a kernel each."""
    flow, matches = ValueFlow(graph), list[_Trained]()
    for written in written_attentions(graph):
        match = _trained(flow, written)
        if match is not None:
            matches.append(match)
    if not matches:
        return graph
    ends = {match.written.last.id: match for match in matches}
    lasts = {match.apart.backward[-1].id: match for match in matches}
    gone = {op for match in matches for op in match.written.inner}
    gone |= {op.id for match in matches for op in match.apart.backward}
    edit, kernels = Editor(graph), dict[int, Op]()
    for op in graph.ops:
        if match := ends.get(op.id):
            emit_flash(edit, (match.written, None))
            kernels[match.apart.out] = next(o for o in edit.ops[::-1] if o.target == ATTENTION)
        elif match := lasts.get(op.id):
            _emit_trained(edit, match.apart, kernels[match.apart.out])
        elif op.id not in gone:
            edit.ops.append(op)
    return released(without_left_behind(edit.done(), graph), graph).verify()


def _trained(flow: ValueFlow, written: WrittenAttention) -> _Trained | None:
    """Hand-written attention with its backward; None where this is not known."""
    ops, first, last = flow.graph.ops, written.first, written.last
    inner = [ops[number] for number in sorted(written.inner)]
    made = {value for op in inner for value in op.outputs}
    starts = (operand(first, "self"), operand(first, "mat2"), operand(last, "mat2"))
    where = {(op.source, op.module, op.call, op.repeats) for op in (*inner, last)}
    later = [
        op
        for op in ops
        if op.part == "backward" and (op.source, op.module, op.call, op.repeats) in where
    ]
    match = AttentionApart((*inner, last), starts, last.outputs[0], False)
    read = made | {ref.id for ref in starts}
    known = with_backward(flow, match, later, read) if later else None
    if known is None:
        return None
    away = {op.id for op in (*known.backward, *inner, last)}
    readers = {user.id for value in made for user in flow.users.get(value, ())}
    return _Trained(written, known) if readers <= away else None


def _emit_trained(edit: Editor, match: AttentionApart, kernel: Op) -> None:
    """The kernel of the gradients of query, key and value."""
    like = match.backward[-1]
    grads = tuple(
        edit.value(edit.values[operand(kernel, name).id].shape, edit.values[value].dtype,
                   "gradients", like.repeats)
        for name, value in zip(("query", "key", "value"), match.grads, strict=True)
    )  # fmt: skip
    assert match.grad_out is not None
    out, logsumexp = kernel.outputs
    grad = edit.viewed(like, match.grad_out, edit.values[out].shape)
    saved: dict[str, Argument] = {"out": Ref(out), "logsumexp": Ref(logsumexp)}
    arguments: dict[str, Argument] = {"grad_out": grad, **kernel.arguments, **saved}
    facts = {name: kernel.facts[name] for name in MASK_FACTS if name in kernel.facts}
    edit.emit(like, ATTENTION_BACKWARD, arguments, grads, facts=facts)
    for value, made in zip(match.grads, grads, strict=True):
        edit.becomes(like, value, Ref(made))
