"""Findings: lines of the user's code that a small change makes faster, as edits of a graph.

Each is read off the captured graph; its edit makes the graph of the mended code: the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from rooftrace.costmodels.fusion.traffic import has_channels_last, weight_shape
from rooftrace.costmodels.ops import find_rule
from rooftrace.costmodels.ops.cost import UNFUSED
from rooftrace.costmodels.rewrites.attention_kernels import with_narrow_attention
from rooftrace.costmodels.rewrites.causal_convs import with_groups
from rooftrace.costmodels.rewrites.dataflow import (
    BothWays,
    ValueFlow,
    dense,
    dense_like,
    relaid,
)
from rooftrace.costmodels.rewrites.editing import (
    ATTENTION,
    ATTENTION_BACKWARD,
    DOUBLES,
    LOSSES,
    NORMS,
    Editor,
    cast_weights,
    operand,
    promoted,
    without_doubles,
    without_promotions,
    without_weight_casts,
)
from rooftrace.costmodels.rewrites.fused_products import under_autocast
from rooftrace.costmodels.rewrites.padding import (
    odd_sizes,
    own_sizes,
    with_padded_products,
    with_sizes,
)
from rooftrace.costmodels.rewrites.scans import with_recurrent_layers
from rooftrace.costmodels.rewrites.spread import (
    IMAGES,
    Laid,
    copied_late,
    last_strides,
    without_checkpoints,
)
from rooftrace.costmodels.rewrites.statetrials import with_named_forms, written_forms
from rooftrace.costmodels.rewrites.trained import (
    apart,
    by_which,
    chosen_by_masks,
    first_of_sorted,
    framed,
    heads_shared,
    joined_once,
    masks_told,
    over_lists,
    with_fused_optimizer,
    with_room,
    without_unread_gradients,
    written_attention,
)
from rooftrace.costmodels.rewrites.waste import (
    batched,
    looked_up,
    made_before,
    without_repeated_work,
    without_waits,
)
from rooftrace.graph import Argument, Op, OpGraph, Ref, Tensor, pattern_of
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
    narrow: bool = False  # whether nothing is multiplied in fp32 then


def findings(
    graph: OpGraph, load: int, compiled: bool, halves: Sequence[str] = ()
) -> Iterator[Mend]:
    """Every finding of a captured graph; whether it is worth anything is for prices to say.

    load: bytes that a thread loads at once, where rows begin at multiples of that.  compiled:
    whether a compiler makes one kernel of the optimizer already.  halves: precisions of 16 bits
    that the chip multiplies in, the best first.
    """
    for why, action, needs in _MATH:
        if any(_is_unfused(op, why) for op in graph.ops):
            edit = partial(with_contiguous_attention, why=why)
            yield Mend("layout", action, f"{needs}attention then has a kernel of its own", edit)
    images = [op.inputs[0] for op in graph.ops if _is_image_first(graph, op)]
    if images:
        formats = sorted({IMAGES[len(graph.values[image].shape)] for image in images})
        yield Mend(
            "layout",
            f"Lay images out with channels last (memory_format={listed(formats)})",
            "the module and its inputs in this layout",
            with_channels_last,
        )
    yield from _of_sizes(graph, load)
    fused = None if compiled else _changing(graph, with_fused_optimizer)
    if fused:
        yield Mend(
            "optimizer",
            "Update the weights in one fused kernel (fused=True of the optimizer)",
            "all parameters on the GPU",
            fused,
        )
    if graph.phase == "training":
        yield from _of_attention(graph)
    yield from _of_waste(graph)
    yield from _of_precisions(graph)
    if halves and graph.model.get("priced_dtype", graph.model.get("dtype")) in (None, "fp32"):
        half = halves[0]
        scaled = ", a GradScaler" if graph.phase == "training" and half == "fp16" else ""
        if not any(tensor.dtype in halves for tensor in graph.values):
            yield Mend(
                "compute",
                f"Run the step under torch.autocast in {half}",
                f"products in {half}; casts are counted{scaled}; accuracy is not checked",
                partial(under_autocast, half=half),
                narrow=True,
            )
    yield from _of_calls(graph, compiled)


def _of_sizes(graph: OpGraph, load: int) -> Iterator[Mend]:
    """Findings of widths that are padded everywhere, and of those padded for products alone."""
    odd = odd_sizes(graph, load)
    own = own_sizes(graph) & odd.keys() if odd else frozenset()
    if rest := {size: wide for size, wide in odd.items() if size not in own}:
        told = listed([f"{size:,} to {wide:,}" for size, wide in rest.items()])
        yield Mend(
            "padding",
            f"Pad {told}, so that rows begin at multiples of {load} bytes",
            "rows of zeros in these weights, and what reads their results to leave them out",
            lambda graph: with_sizes(graph, rest),
        )
    for size in sorted(own):
        edit = partial(with_padded_products, size=size, wide=odd[size])
        if changing := _changing(graph, edit):
            yield Mend(
                "padding",
                f"Pad {size:,} to {odd[size]:,} in products with weights (F.pad), so that rows "
                f"begin at multiples of {load} bytes",
                "zeros in these weights; copies with zeros of what they multiply are counted",
                changing,
            )


def _changing(graph: OpGraph, edit: Edit) -> Edit | None:
    """The edit, which has its result for this graph already; None where that is the same graph."""
    made = edit(graph)
    return None if made is graph else lambda other: made if other is graph else edit(other)


def _of_attention(graph: OpGraph) -> Iterator[Mend]:
    """Findings of attention in training; `REWRITES` has the same for inference."""
    for action, edit in (
        (
            f"Compute attention that is written out in one kernel{by_which(graph)}",
            written_attention,
        ),
        ("Tell the attention kernel the kind of its mask, not the mask", masks_told),
        ("Read keys and values that heads share without a copy for each", heads_shared),
    ):
        if changing := _changing(graph, edit):
            yield Mend("rewrite", action, "code that does so; results stay the same", changing)


def _of_waste(graph: OpGraph) -> Iterator[Mend]:
    """Findings of waits and copies that the code could leave out."""
    waiting = [op for op in graph.ops if op.kind == "sync"]
    if waiting:
        count = plural(sum(map(graph.times, waiting)), "wait")
        yield Mend(
            "wait",
            f"Keep values on the device: {count} for them in the step (.item())",
            "code that goes on with the tensor in place of the number",
            without_waits,
        )
    if changing := _changing(graph, chosen_by_masks):
        yield Mend(
            "wait",
            "Choose by masks with torch.where, not by an index, for whose size the host waits",
            "rows that a mask leaves out are read, too",
            changing,
        )
    if needless_copies(graph):
        yield Mend(
            "copy",
            "Leave out copies whose readers take the original as well",
            "nothing that writes into either of them",
            without_copies,
        )


def _of_precisions(graph: OpGraph) -> Iterator[Mend]:
    """Findings of numbers that are wider than the rest, and of casts of weights in each step."""
    if any(t.dtype in DOUBLES for t in graph.values) and graph.model.get("dtype") != "fp64":
        yield Mend(
            "compute",
            "Compute in fp32 what is in fp64 beside the rest",
            "float32 where numbers are made (NumPy's are float64); accuracy is not checked",
            without_doubles,
        )
    for kernels, action, needs in _WIDE:
        if promoted(graph, kernels):
            action = action.format(graph.model["dtype"])
            edit = partial(without_promotions, casts=kernels)
            yield Mend("compute", action, f"{needs}; accuracy is not checked", edit)
    if changing := _changing(graph, with_narrow_attention):
        yield Mend(
            "compute",
            f"Attend in {graph.model['dtype']}, to which its results are rounded, not in fp32",
            "operands that are rounded before; accuracy is not checked",
            changing,
        )
    casts = cast_weights(graph) if graph.phase != "training" else {}
    if casts:
        yield Mend(
            "copy",
            f"Store weights in {listed(sorted({*casts.values()}))}, as each step casts them",
            "weights that are rounded once; nothing that reads them as they are",
            without_weight_casts,
        )


_WIDE: tuple[tuple[Collection[str], str, str], ...] = (
    (
        (),
        "Keep in {} what a tensor in fp32 makes fp32",
        "buffers and tables in the precision of the model",
    ),
    (
        LOSSES,
        "Take the loss of logits in {}, without a copy in fp32",
        "logarithms that are rounded once more; their sums are in fp32 all the same",
    ),
    (
        NORMS,
        "Take norms of {}, without a copy in fp32",
        "results that are rounded once, as before; sums are in fp32 all the same",
    ),
)
"""Kernels whose operands are widened for them, actions, and what they need."""


def _of_calls(graph: OpGraph, compiled: bool) -> Iterator[Mend]:
    """Findings of calls that one call replaces, that run before the steps, or not at all."""
    if named := written_forms(graph):
        yield Mend(
            "rewrite",
            f"Call by its name what is written out: {listed(sorted(named))}",
            "results that are rounded once, at the end",
            lambda other: with_named_forms(other, named if other is graph else None),
        )
    for action, needs, edit in _CALLS:
        if changing := _changing(graph, edit):
            yield Mend("rewrite", action, needs, changing)
    if changing := _changing(graph, without_checkpoints):
        again = {pattern_of(op.module) for op in graph.ops if op.part == "recompute"}
        lists = sorted({path.partition(".*")[0] or "the model" for path in again})[:3]
        yield Mend(
            "memory",
            f"Leave out checkpoints of {listed(lists)}: the step fits without them",
            "memory for what backward reads, at this batch",
            changing,
        )
    once = graph if compiled and graph.phase == "training" else without_repeated_work(graph)
    if sum(map(once.times, once.kernels())) < sum(map(graph.times, graph.kernels())):
        yield Mend(
            "rewrite",
            "Compute once what is computed again from the same values",
            "code that hands the result on, as a mask to each layer",
            lambda other: once if other is graph else without_repeated_work(other),
        )


def _batched(graph: OpGraph) -> OpGraph:
    """The graph with equal calls as one; attention has one more dimension then."""
    wide = with_contiguous_attention(graph, why=_RANK)
    together = batched(wide)
    return graph if together is wide else together


_CALLS: tuple[tuple[str, str, Edit], ...] = (
    (
        "Compute equal calls, which do not read each other, as one call with a batch of them",
        "their weights stored as one tensor, and code that hands them on together",
        _batched,
    ),
    (
        "Convolve parts of channels in one call with groups, not one after the other (groups=)",
        "their weights stored as one tensor",
        with_groups,
    ),
    (
        "Make once, before the steps, what each step makes of weights or sizes alone",
        "the result kept as a buffer, made again where the weights or sizes change",
        made_before,
    ),
    (
        "Take all steps in one layer, not a cell for each (nn.LSTM, nn.GRU, nn.RNN)",
        "inputs that are all there before the first step",
        with_recurrent_layers,
    ),
    (
        "Compute on rows before they are repeated (expand, repeat, upsample), not on their copies",
        "the repetition moved behind what acts on each row alone",
        copied_late,
    ),
    (
        "Look rows up, in place of a product with ones and zeros (nn.Embedding)",
        "indices handed on as they are",
        looked_up,
    ),
    (
        "Look for the first few, in place of a sort (torch.topk)",
        "an order among equals that may be another one",
        first_of_sorted,
    ),
    (
        "Write new rows into tensors that have room, in place of a longer copy (torch.cat)",
        "tensors of the greatest length from the start; a slice of them is read",
        with_room,
    ),
    (
        "Take parts of a tensor at equal distances as a view (Tensor.unfold), not one by one",
        "readers that take frames which overlap in memory",
        framed,
    ),
    (
        "Join the tensors of a loop once, after it, not in each pass (torch.cat)",
        "a list of the tensors until then",
        joined_once,
    ),
    (
        "Leave out gradients that no optimizer reads (torch.no_grad, requires_grad_(False))",
        "a module that is not trained in this step",
        without_unread_gradients,
    ),
    (
        "Take all tensors of a loop in one call (foreach=True, torch._foreach_mul_)",
        "lists of tensors, which the calls take as they are",
        over_lists,
    ),
)
"""Actions, what they need, and their edits."""


# -- attention on the math path --------------------------------------------------------------------

_WIDTH, _RANK, _ODD = "the width of an operand", "operands have 3 dimensions", "heads of"
"""How the reasons begin for which CUDA has no kernel (`recording.library.why_math`)."""
_MATH = (
    (_RANK, "Give query, key and value four dimensions (.unsqueeze(1))", ""),
    (
        _WIDTH,
        "Make the width of query, key and value their innermost dimension (.contiguous())",
        "a copy of each, which is counted; ",
    ),
    (
        _ODD,
        "Pad heads for attention to a width that is a multiple of 16 bytes (F.pad, scale=)",
        "zeros, whose copies are counted; ",
    ),
)
"""The beginning of a reason, the action, and what it needs."""


def _is_unfused(op: Op, why: str) -> bool:
    return str(op.facts.get(UNFUSED, "")).startswith(why)


def with_contiguous_attention(graph: OpGraph, copied: bool = True, why: str = _WIDTH) -> OpGraph:
    """Attention of operands whose width is not innermost becomes copies of them, and a kernel.

    why: the beginning of the reason that is mended: operands of other dimensions become a kernel as
    those of four are, odd widths are padded.  copied: whether operands may need a copy; the same
    graph where there is nothing to mend.
    """
    flow = ValueFlow(graph)
    matches = [match for op in graph.ops if _is_unfused(op, why) if (match := apart(flow, op))]
    if not copied:
        matches = [
            m for m in matches if all(graph.values[r.id].stride[-1] == 1 for r in m.operands)
        ]
    if not matches:
        return graph
    firsts = {match.forward[-1].id: match for match in matches}
    step = 16 if why == _ODD else 1  # bytes; rows of fp32 need as many (`why_math`)
    lasts = {match.backward[-1].id: match for match in matches if match.backward}
    gone = {op.id for match in matches for op in (*match.forward, *match.backward)}
    edit, made = Editor(graph), dict[int, tuple[Ref, ...]]()
    strides = dict[int, tuple[int, ...]]()
    for op in graph.ops:
        if match := firsts.get(op.id):
            made[match.out] = kept = _emit_forward(edit, match, step)
            # The strides of attention's result, which its kernels make by position, then by head
            out = edit.values[kept[3].id]
            rank = len(out.shape)
            strides[match.out] = dense(out.shape, (*range(rank - 3), rank - 2, rank - 3, rank - 1))
        elif match := lasts.get(op.id):
            strides |= _emit_backward(edit, match, made[match.out])
        elif op.id not in gone:
            edit.ops.append(op)
    mended = edit.mended()
    return Laid(mended, strides).done()


def _emit_forward(edit: Editor, match: BothWays, step: int) -> tuple[Ref, ...]:
    """Copies of the operands and the kernel; returns what backward reads of them.

    step: bytes, multiples of which the heads of operands become wide.
    """
    like = match.forward[-1]
    copies = []
    for ref in match.operands:
        tensor = edit.values[ref.id]
        wide = _multiple(tensor, step)
        if wide == tensor.shape[-1] and tensor.stride[-1] == 1:
            copies.append(ref)
        elif wide == tensor.shape[-1]:
            how: dict[str, Argument] = {"self": ref}
            copies.append(edit.made(like, _CLONE, how, tensor.shape, tensor.dtype))
        else:
            copies.append(_padded(edit, like, ref, wide, "activations"))
    edit.move(match.out, match.out)
    out = replace(edit.values[match.out], dtype=edit.values[copies[0].id].dtype)
    edit.values[match.out], whole = out, Ref(match.out)
    wide = edit.values[copies[2].id].shape[-1]
    if wide != out.shape[-1]:
        whole = Ref(edit.value((*out.shape[:-1], wide), out.dtype, out.role, like.repeats))
        edit.move(match.out, whole.id)
    logsumexp = edit.value(out.shape[:-1], "fp32", "activations", like.repeats)
    arguments = {**_attention(copies, match.mask), "is_causal": match.is_causal}
    edit.emit(like, ATTENTION, arguments, (whole.id, logsumexp))
    if whole.id != match.out:
        cut = {"self": whole, "dim": len(out.shape) - 1, "start": 0, "end": out.shape[-1]}
        edit.emit(like, "aten.slice.Tensor", cut, (match.out,), kind="view")
    return (*copies, whole, Ref(logsumexp))


_CLONE = "aten.clone.default"


def _multiple(tensor: Tensor, step: int) -> int:
    """The width of a tensor as the next multiple of so many bytes."""
    step = max(1, step * 8 // precision(tensor.dtype).bits)
    return -(-tensor.shape[-1] // step) * step


def _padded(edit: Editor, like: Op, ref: Ref, wide: int, role: str) -> Ref:
    """A value with zeros behind each row, up to a width."""
    tensor = edit.values[ref.id]
    how: dict[str, Argument] = {"self": ref, "pad": (0, wide - tensor.shape[-1])}
    shape = (*tensor.shape[:-1], wide)
    return edit.made(like, "aten.constant_pad_nd.default", how, shape, tensor.dtype, role)


def _attention(operands: Sequence[Ref], mask: Ref | None) -> dict[str, Argument]:
    named = dict(zip(("query", "key", "value"), operands, strict=True))
    return {**named, "mask": mask, "dropout_p": 0.0}


def _emit_backward(
    edit: Editor, match: BothWays, kept: tuple[Ref, ...]
) -> dict[int, tuple[int, ...]]:
    """The kernel of the gradients; returns their strides, in the order of their operands'."""
    assert match.grad_out is not None
    like, (*operands, out, logsumexp) = match.backward[-1], kept
    made, strides = [], {}
    for ref, value in zip(operands, match.grads, strict=True):
        t, there = edit.values[ref.id], edit.values[value]
        before = there.stride if there.shape == t.shape else None
        made.append(edit.value(t.shape, t.dtype, "gradients", like.repeats, stride=before))
        strides[made[-1]] = dense_like(t.shape, t.stride)
    empty = edit.value((0,), "fp32", "gradients", like.repeats)
    whole, grad = edit.values[out.id], match.grad_out
    shape = edit.values[match.out].shape
    if edit.values[grad.id].shape != shape:
        grad = edit.viewed(like, grad, shape)
    if shape != whole.shape:
        grad = _padded(edit, like, grad, whole.shape[-1], "gradients")
    told = _attention(operands, match.mask)
    arguments = {"grad_out": grad, **told, "out": out, "logsumexp": logsumexp}
    arguments["is_causal"] = match.is_causal
    edit.emit(like, ATTENTION_BACKWARD, arguments, (*made, empty))
    for ref, value, new in zip(match.operands, match.grads, made, strict=True):
        t, grad = edit.values[ref.id], Ref(new)
        if edit.values[new].shape != t.shape:  # `constant_pad_nd` of less than nothing is a copy
            cut = edit.sliced(like, grad, len(t.shape) - 1, 0, t.shape[-1])
            grad = edit.made(like, _CLONE, {"self": cut}, t.shape, t.dtype, "gradients")
        edit.becomes(like, value, grad)
    return strides


# -- layouts of images -----------------------------------------------------------------------------


def _is_image_first(graph: OpGraph, op: Op) -> bool:
    """Whether a convolution over images reads its channels first."""
    if op.kind != "kernel" or op.name != "aten.convolution" or weight_shape(op, graph) is None:
        return False
    image = graph.values[op.inputs[0]]
    return len(image.shape) in IMAGES and not has_channels_last(image)


def with_channels_last(graph: OpGraph) -> OpGraph:
    """Images and weights have channels last, and what is made of them lies as ATen lays it.

    Attention has a kernel of its own where the width of its operands is innermost then.
    """
    values = graph.values
    ranks = {len(values[op.inputs[0]].shape) for op in graph.ops if _is_image_first(graph, op)}
    own = [v for v in graph.external if values[v].storage == v and len(values[v].shape) in ranks]
    laid = Laid(
        graph, {value: last for value in own if (last := last_strides(values[value]))}
    ).done()
    return with_contiguous_attention(laid, copied=False)


_ASKED = frozenset({"contiguous", "clone"})
"""Functions by which the code asks for a copy; reshape and others make one only where they must."""


def needless_copies(graph: OpGraph) -> tuple[Op, ...]:
    """Copies that the code asks for, all of whose readers take the original as it lies."""
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
    last = max(op.id for op in flow.storage_users[storage])
    written = flow.overwritten(before.id, copy.id, last)
    return not written and _takes(flow, made, flow.values[before.id].stride)


def _takes(flow: ValueFlow, value: int, stride: tuple[int, ...], viewed: bool = False) -> bool:
    """Whether all readers of a value take it at other strides, without a copy.

    Elementwise ops and sums take any; products, of views too, matrices in either order (BLAS);
    kernels of attention rows of adjacent elements that begin at multiples of 16 bytes.
    """
    tensor = flow.values[value]
    for op in flow.users[value]:
        rule = find_rule(op.target)
        product = op.name in ("aten.mm", "aten.bmm") and 1 in stride[-2:] and 0 not in stride
        any_order = rule is not None and rule.fusion in ("pointwise", "reduction") and not viewed
        bits = precision(tensor.dtype).bits
        rows = stride[-1:] == (1,) and not any(n * bits % 128 for n in stride[:-1])
        attends = rows and op.target in (ATTENTION, ATTENTION_BACKWARD)
        fits = any_order or product or attends
        if op.kind == "view":
            views = [v for v in op.outputs if flow.values[v].storage == tensor.storage]
            laid = {v: relaid(flow.values[v], tensor, stride) for v in views}
            fits = all(now is not None and _takes(flow, v, now, True) for v, now in laid.items())
        if not fits and (rule is None or stride != tensor.stride):
            return False
    return bool(flow.users[value])


def without_copies(graph: OpGraph) -> OpGraph:
    """The graph without needless copies."""
    return Laid(graph, {}, {op.id for op in needless_copies(graph)}).done()
