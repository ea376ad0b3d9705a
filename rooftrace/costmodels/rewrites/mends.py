"""Findings: lines of the user's code that a small change makes faster, as edits of a graph.

Each is read off the captured graph; its edit makes the graph of the mended code: the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from rooftrace.costmodels.ops.cost import MASK_FACTS
from rooftrace.costmodels.rewrites.attention_kernels import (
    attention_kernels,
    masks_as_numbers,
    with_narrow_attention,
)
from rooftrace.costmodels.rewrites.attention_products import written_attentions
from rooftrace.costmodels.rewrites.causal_convs import with_groups
from rooftrace.costmodels.rewrites.dataflow import IMAGES, ValueFlow
from rooftrace.costmodels.rewrites.editing import (
    ATTENTION,
    DOUBLES,
    LOSSES,
    NORMS,
    Editor,
    cast_weights,
    operand,
    promoted,
    reading_others,
    without_doubles,
    without_promotions,
    without_weight_casts,
)
from rooftrace.costmodels.rewrites.fused_products import under_autocast
from rooftrace.costmodels.rewrites.layouts import (
    MATH,
    RANK,
    is_image_first,
    is_unfused,
    needless_copies,
    odd_sizes,
    own_sizes,
    with_channels_last,
    with_contiguous_attention,
    with_padded_products,
    with_sizes,
    without_copies,
)
from rooftrace.costmodels.rewrites.rewrites import WRITTEN
from rooftrace.costmodels.rewrites.scans import with_recurrent_layers
from rooftrace.costmodels.rewrites.spread import copied_late
from rooftrace.costmodels.rewrites.statetrials import with_named_forms, written_forms
from rooftrace.costmodels.rewrites.trained import (
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
    key_of,
    looked_up,
    made_before,
    without_checks,
    without_repeated_work,
    without_waits,
)
from rooftrace.graph import Op, OpGraph, Ref, Tensor, pattern_of
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
    for why, action, needs in MATH:
        if any(is_unfused(op, why) for op in graph.ops):
            edit = partial(with_contiguous_attention, why=why)
            yield Mend("layout", action, f"{needs}attention then has a kernel of its own", edit)
    images = [op.inputs[0] for op in graph.ops if is_image_first(graph, op)]
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
    yield from _of_unknown_masks(graph)
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
    return None if made is graph else _kept(graph, made, edit)


def _kept(graph: OpGraph, made: OpGraph, edit: Edit) -> Edit:
    """An edit that has its result for this graph already."""
    return lambda other: made if other is graph else edit(other)


def _of_attention(graph: OpGraph) -> Iterator[Mend]:
    """Findings of attention in training; `REWRITES` has the same for inference."""
    needs = "code that does so; results stay the same"
    written = written_attention(graph)
    if written is not graph:
        action = f"{_IN_ONE}{by_which(graph)}{_told_kind(written)}"
        yield Mend("rewrite", action, needs, _kept(graph, masks_told(written), _in_one))
    for action, edit in (
        ("Tell the attention kernel the kind of its mask, not the mask", masks_told),
        ("Read keys and values that heads share without a copy for each", heads_shared),
    ):
        if changing := _changing(graph, edit):
            yield Mend("rewrite", action, needs, changing)


_IN_ONE = "Compute attention that is written out in one kernel"


def _in_one(graph: OpGraph) -> OpGraph:
    """Attention that is written out becomes one kernel, which is told the kind of its mask."""
    training = graph.phase == "training"
    written = written_attention(graph) if training else attention_kernels(graph)[0]
    return graph if written is graph else masks_told(written)


def _told_kind(graph: OpGraph) -> str:
    """Words of an action after which no mask is read that a number stands for."""
    return ", and tell it the kind of its mask (is_causal=)" if masks_as_numbers(graph)[1] else ""


def written_rewrites(graph: OpGraph) -> tuple[str, tuple[str, ...]]:
    """The action that makes attention written out one kernel, and the rewrites for the same."""
    told = _told_kind(attention_kernels(graph)[0])
    names = (WRITTEN, "mask-numbers") if told else (WRITTEN,)
    return f"{_IN_ONE}{by_which(graph)}{told}", names


def _told_in_one(graph: OpGraph) -> OpGraph:
    """Kernels are told the kinds of their masks, of attention that is written out, too."""
    return masks_told(_in_one(graph))


def _of_unknown_masks(graph: OpGraph) -> Iterator[Mend]:
    """The finding of masks whose values are not known, priced as if they were causal."""
    causal, names = with_causal_buffers(graph)
    told = _told_in_one(causal) if names else graph
    if told is not graph:
        yield Mend(
            "rewrite",
            "Attend with is_causal=True in place of a mask, if it is causal",
            f"a mask that hides all later keys: {listed(names)} on meta has no values; those of "
            "a module on the CPU are read",
            _kept(graph, told, lambda other: _told_in_one(with_causal_buffers(other)[0])),
            at_most=True,
        )


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
    if changing := _changing(graph, without_checks):
        yield Mend(
            "wait",
            "Leave out conditions that the host waits for, or look at them every so many steps",
            "errors that are seen later, or not; what only they read is not computed",
            changing,
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
    wide = with_contiguous_attention(graph, why=RANK)
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


# -- masks without values --------------------------------------------------------------------------


def with_causal_buffers(graph: OpGraph) -> tuple[OpGraph, tuple[str, ...]]:
    """The graph whose masks of buffers without values are causal, and the names of these buffers.

    A module that was built on meta has no values in its buffers.
    """
    flow, facts, names = ValueFlow(graph), dict[int, dict[str, Any]](), dict[str, None]()
    masked = [
        (w.mask.op, w.mask.tensor, graph.values[w.first.outputs[0]].shape[-2:])
        for w in written_attentions(graph)
        if w.mask is not None
    ]
    for op in graph.ops:
        mask = op.arguments.get("mask")
        if op.target == ATTENTION and op.part == "forward" and isinstance(mask, Ref):
            sides = (graph.values[operand(op, name).id].shape[-2] for name in ("query", "key"))
            masked.append((op, mask, tuple(sides)))
    for op, mask, (rows, columns) in masked:
        buffers = _buffers_of(flow, mask.id)
        if buffers and rows == columns and "mask" not in op.facts:
            pairs = rows * (rows + 1) // 2
            facts[op.id] = dict(zip(MASK_FACTS, (pairs, "causal", rows, rows), strict=True))
            names |= dict.fromkeys(name.rpartition(".")[2] for name in buffers)
    guessed = {n for n, each in enumerate(graph.assumptions) if each.kind == "mask"}
    ops = (
        replace(
            op,
            facts={**op.facts, **facts[op.id]},
            assumptions=tuple(n for n in op.assumptions if n not in guessed),
        )
        if op.id in facts
        else op
        for op in graph.ops
    )
    return graph.replace(ops=tuple(ops)) if facts else graph, tuple(names)


def _buffers_of(flow: ValueFlow, value: int) -> set[str]:
    """The names of the buffers that a value is made of; none where it is made of others, too.

    Persistent ones are weights, and could be learnt where they are no condition.
    """
    names, stack = set[str](), [value]
    roles = ("constants", *(["weights"] if flow.values[value].dtype == "bool" else []))
    while stack:
        made = stack.pop()
        by, tensor = flow.producer(made), flow.values[made]
        if by is not None:
            stack += by.inputs
        elif tensor.role not in roles or made in flow.graph.inputs:
            return set()
        else:
            names.add(tensor.name)
    return names


# -- checkpoints ----------------------------------------------------------------------------------


_REFILL = "fsdp.split_with_sizes_copy"
"""Writes gathered weights, for forward and again for backward."""


def without_checkpoints(graph: OpGraph) -> OpGraph:
    """Backward reads what forward made, in place of the same made again.

    Weights that are gathered again for backward equal those of forward; it reads these again.
    Layers that repeat are written out where they do not all repeat alike.
    """
    if not any(op.part == "recompute" for op in graph.ops):
        return graph
    made = _reading_forward(graph)
    rest = any(op.part == "recompute" and op.kind == "kernel" for op in made.ops)
    return _reading_forward(graph.expand()) if rest and graph.repeats else made


def _reading_forward(graph: OpGraph) -> OpGraph:
    """The graph without ops that make again what is there in each iteration in which they run."""
    edit, first, values = Editor(graph), dict[Any, Op](), graph.values
    again, twice = dict[int, int](), dict[int, int]()  # values -> equal ones of forward
    writers = edit.flow.writers.items()
    written = {
        where
        for where, ops in writers
        if any(op.part != "optimizer" and op.name != _REFILL for op in ops)
    }
    for op in graph.ops:
        op = reading_others(op, again)
        # forward itself may make a view for each reader
        key = _key_of_results(values, reading_others(op, twice), written)
        same = first.setdefault(key, op) if key and op.part == "forward" else first.get(key)
        there = same is not None and op.repeats[: len(same.repeats)] == same.repeats
        others = same.outputs if same is not None and there else op.outputs
        equal = {v: other for v, other in zip(op.outputs, others, strict=True) if v != other}
        on_weights = op.kind == "view" and values[min(op.outputs, default=0)].role == "weights"
        if equal and op.part == "recompute" and not on_weights:
            again |= equal
        else:
            edit.ops.append(op)
            twice |= equal
    return edit.mended()


def _key_of_results(values: Sequence[Tensor], op: Op, written: Set[int]) -> Any:
    """A key that ops of equal results share; None where nothing is known to be equal."""
    if not op.outputs or op.part == "optimizer":
        return None
    (tensor, *_), inputs = [values[v] for v in op.outputs], [values[v] for v in op.inputs]
    is_weight = tensor.role == "weights" and tensor.name
    if is_weight and all(value.name != tensor.name for value in inputs):  # of gathered shards
        return tensor.name, tensor.shape, tensor.stride
    touched = {values[v].storage for v in (*op.inputs, *op.outputs)}
    if op.part == "backward" or not written.isdisjoint(touched):
        return None
    return op.target, key_of(op.arguments)
