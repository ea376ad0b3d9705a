"""Findings: lines of the user's code that a small change makes faster, as edits of a graph.

Each is read off the captured graph; its edit makes the graph of the mended code: the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from rooftrace.costmodels.fusion.traffic import has_channels_last, weight_shape
from rooftrace.costmodels.ops import find_rule
from rooftrace.costmodels.ops.cost import UNFUSED
from rooftrace.costmodels.rewrites.dataflow import (
    ValueFlow,
    dense,
    dense_like,
    reads_across,
    relaid,
    same_strides,
)
from rooftrace.costmodels.rewrites.editing import (
    ATTENTION,
    ATTENTION_BACKWARD,
    DOUBLES,
    LOSSES,
    NORMS,
    Editor,
    cast_weights,
    promoted,
    reading_others,
    released,
    without_doubles,
    without_left_behind,
    without_promotions,
    without_weight_casts,
)
from rooftrace.costmodels.rewrites.scans import with_recurrent_layers
from rooftrace.costmodels.rewrites.spread import copied_late
from rooftrace.costmodels.rewrites.trained import (
    AttentionApart,
    apart,
    by_which,
    first_of_sorted,
    heads_shared,
    joined_once,
    masks_told,
    odd_sizes,
    over_lists,
    with_fused_optimizer,
    with_room,
    with_sizes,
    without_checkpoints,
    without_unread_gradients,
    written_attention,
)
from rooftrace.costmodels.rewrites.waste import (
    batched,
    looked_up,
    made_before,
    needless_copies,
    without_repeated_work,
    without_waits,
)
from rooftrace.graph import Argument, Op, OpGraph, Ref, Tensor, pattern_of
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
    if any(_is_unfused(op, _RANK) for op in graph.ops):
        yield Mend(
            "layout",
            "Give query, key and value four dimensions (.unsqueeze(1))",
            "attention then has a kernel of its own",
            with_four_dimensions,
        )
    if any(_is_unfused(op, _WIDTH) for op in graph.ops):
        yield Mend(
            "layout",
            "Make the width of query, key and value their innermost dimension (.contiguous())",
            "a copy of each, which is counted; attention then has a kernel of its own",
            with_contiguous_attention,
        )
    images = [op.inputs[0] for op in graph.ops if _is_image_first(graph, op)]
    if images:
        formats = sorted({_IMAGES[len(graph.values[image].shape)] for image in images})
        yield Mend(
            "layout",
            f"Lay images out with channels last (memory_format={listed(formats)})",
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
    yield from _of_calls(graph, compiled)


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
    wide = with_four_dimensions(graph)
    together = batched(wide)
    return graph if together is wide else together


_CALLS: tuple[tuple[str, str, Edit], ...] = (
    (
        "Compute equal calls, which do not read each other, as one call with a batch of them",
        "their weights stored as one tensor, and code that hands them on together",
        _batched,
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

_WIDTH, _RANK = "the width of an operand", "operands have 3 dimensions"
"""How the reasons begin for which CUDA has no kernel (`recording.library.why_math`)."""


def _is_unfused(op: Op, why: str) -> bool:
    return str(op.facts.get(UNFUSED, "")).startswith(why)


def with_four_dimensions(graph: OpGraph) -> OpGraph:
    """Attention of operands with three dimensions becomes a kernel, as it is with four."""
    return with_contiguous_attention(graph, why=_RANK)


def with_contiguous_attention(graph: OpGraph, copied: bool = True, why: str = _WIDTH) -> OpGraph:
    """Attention of operands whose width is not innermost becomes copies of them, and a kernel.

    copied: whether operands may need a copy; the same graph where there is nothing to mend.
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
    lasts = {match.backward[-1].id: match for match in matches if match.backward}
    gone = {op.id for match in matches for op in (*match.forward, *match.backward)}
    edit, made = Editor(graph), dict[int, tuple[Ref, ...]]()
    strides = {match.out: _by_position(graph.values[match.out]) for match in matches}
    for op in graph.ops:
        if match := firsts.get(op.id):
            made[match.out] = _emit_forward(edit, match)
        elif match := lasts.get(op.id):
            strides |= _emit_backward(edit, match, made[match.out])
        elif op.id not in gone:
            edit.ops.append(op)
    mended = released(without_left_behind(edit.done(), graph), graph)
    return _Laid(mended, strides).done()


def _by_position(out: Tensor) -> tuple[int, ...]:
    """The strides of attention's result, which its kernels make by position, then by head."""
    rank = len(out.shape)
    return dense(out.shape, (*range(rank - 3), rank - 2, rank - 3, rank - 1))


def _emit_forward(edit: Editor, match: AttentionApart) -> tuple[Ref, ...]:
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
    edit.move(match.out, match.out)
    out = replace(edit.values[match.out], dtype=edit.values[copies[0].id].dtype)
    edit.values[match.out] = out
    logsumexp = edit.value(out.shape[:-1], "fp32", "activations", like.repeats)
    arguments = {**_attention(copies), "is_causal": match.is_causal}
    edit.emit(like, ATTENTION, arguments, (match.out, logsumexp))
    return (*copies, Ref(match.out), Ref(logsumexp))


def _attention(operands: Sequence[Ref]) -> dict[str, Argument]:
    named = dict(zip(("query", "key", "value"), operands, strict=True))
    return {**named, "mask": None, "dropout_p": 0.0}


def _emit_backward(
    edit: Editor, match: AttentionApart, kept: tuple[Ref, ...]
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
    shape, grad = edit.values[out.id].shape, match.grad_out
    if edit.values[grad.id].shape != shape:
        grad = edit.viewed(like, grad, shape)
    arguments = {"grad_out": grad, **_attention(operands), "out": out, "logsumexp": logsumexp}
    arguments["is_causal"] = match.is_causal
    edit.emit(like, ATTENTION_BACKWARD, arguments, (*made, empty))
    for value, new in zip(match.grads, made, strict=True):
        edit.becomes(like, value, Ref(new))
    return strides


# -- layouts of images -----------------------------------------------------------------------------


def _is_image_first(graph: OpGraph, op: Op) -> bool:
    """Whether a convolution over images reads its channels first."""
    if op.kind != "kernel" or op.name != "aten.convolution" or weight_shape(op, graph) is None:
        return False
    image = graph.values[op.inputs[0]]
    return len(image.shape) in _IMAGES and not has_channels_last(image)


_IMAGES = {4: "torch.channels_last", 5: "torch.channels_last_3d"}
"""Memory formats by the number of dimensions of images, and of volumes."""
_KEEPING = ("convolution", "batch_norm", "pool2d", "pool3d", "upsample", "cat")
"""Parts of names of kernels whose results lie as their images do, beside elementwise ones.

Convolutions follow the weight, too (`cudnn_conv_suggest_memory_format` of ATen's ConvUtils.h);
`cat` asks it of all its tensors (`cat_compute_output_memory_format` of TensorShape.cpp).
"""
_CONTIGUOUS = ("group_norm", "layer_norm")
"""Parts of names of kernels of contiguous tensors; ATen copies others for them
(`input.contiguous()` of group_norm.cpp, `expect_contiguous` of layer_norm.cpp, and the gradients
of derivatives.yaml)."""
_FORMAT = "memory_format:torch.contiguous_format"


def with_channels_last(graph: OpGraph) -> OpGraph:
    """Images and weights have channels last, and what is made of them lies as ATen lays it.

    Attention has a kernel of its own where the width of its operands is innermost then.
    """
    values = graph.values
    ranks = {len(values[op.inputs[0]].shape) for op in graph.ops if _is_image_first(graph, op)}
    own = [v for v in graph.external if values[v].storage == v and len(values[v].shape) in ranks]
    laid = _Laid(graph, {value: last for value in own if (last := _last(values[value]))}).done()
    return with_contiguous_attention(laid, copied=False)


def _last(image: Tensor) -> tuple[int, ...] | None:
    """The strides of a contiguous image or weight with channels last; None for other tensors."""
    rank = len(image.shape)
    is_image = rank in _IMAGES and image.stride == Tensor.contiguous(image.shape)
    return dense(image.shape, (0, *range(2, rank), 1)) if is_image else None


def without_copies(graph: OpGraph) -> OpGraph:
    """The graph without needless copies."""
    return _Laid(graph, {}, {op.id for op in needless_copies(graph)}).done()


class _Laid(Editor):
    """A graph in which some values have other strides, and what is made of them too, op by op.

    A view that its operand no longer allows reads a contiguous copy, as `reshape` makes one.  A
    copy for such a view, or for a kernel of contiguous tensors, goes where it is not needed.
    """

    def __init__(
        self, graph: OpGraph, strides: Mapping[int, tuple[int, ...]], gone: Collection[int] = ()
    ) -> None:
        super().__init__(graph)
        self.gone = gone
        self.instead: dict[int, int] = {}  # results of copies that go, and their operands
        self.copies: dict[tuple[int, str, str, int], int] = {}  # by value, line, module and call
        for value, stride in strides.items():
            self._set(value, stride)
        self.given = strides.keys()
        for op in graph.ops:
            if not self._is_needless(op):
                self.ops.append(op if self.given & set(op.outputs) else self._laid(op))

    def done(self) -> OpGraph:
        """The new graph."""
        self.ops = [reading_others(op, self.instead) for op in self.ops]
        return released(super().done(), self.graph).verify()

    def _set(self, value: int, stride: Sequence[int], storage: int | None = None) -> None:
        where = self.values[value].storage if storage is None else storage
        self.values[value] = replace(self.values[value], stride=tuple(stride), storage=where)

    def _is_other(self, value: int) -> bool:
        """Whether a value lies in another order now."""
        return self.values[value].stride != self.graph.values[value].stride

    def _is_last(self, value: int) -> bool:
        """Whether a value has channels last now; so has a weight of one channel."""
        stride = self.values[value].stride
        return self._is_other(value) and len(stride) in _IMAGES and stride[1] == 1

    def _laid(self, op: Op) -> Op:
        """An op after what it makes is laid out; it may read copies that are made before it."""
        if any(self.graph.values[value].storage != value for value in op.outputs):
            return self._with_views(op)
        if any(part in op.name for part in _CONTIGUOUS):
            other = [value for value in op.inputs if self._is_other(value)]
            return op if reads_across(op) else self._with_copies(op, other)
        if any(part in op.name for part in _KEEPING):
            some = all if op.name == "aten.cat" else any
            if some(self._is_last(value) for value in op.inputs):
                for value in op.outputs:
                    self._set(value, _last(self.values[value]) or self.values[value].stride)
        elif op.kind == "view" or _is_elementwise(op):
            for value in op.outputs:
                shape = self.values[value].shape
                like = next((v for v in op.inputs if self.values[v].shape == shape), None)
                if like is not None and self._is_other(like):
                    # the first operand decides (TensorIterator)
                    self._set(value, dense_like(shape, self.values[like].stride))
        return op

    def _with_views(self, op: Op) -> Op:
        """An op whose results lie in the storages of operands."""
        if reads_across(op):
            return op
        old = self.graph.values
        sources = {old[value].storage: value for value in reversed(op.inputs)}
        for value in op.outputs:
            source = sources.get(old[value].storage)
            if source is None:
                continue
            now = self.values[source]
            stride = relaid(old[value], old[source], now.stride)
            if stride is None:
                op = self._with_copies(op, [source])
                now = self.values[op.inputs[0]]
                stride = relaid(old[value], old[source], now.stride)
            self._set(value, stride or Tensor.contiguous(old[value].shape), now.storage)
        return op

    def _with_copies(self, op: Op, of: Sequence[int]) -> Op:
        """An op that reads contiguous copies of some values; its backward reads the same ones."""
        copies = {}
        for value in of:
            key = value, op.source, op.module, op.call
            if key not in self.copies:
                role = "gradients" if op.part == "backward" else "activations"
                how: dict[str, Argument] = {"self": Ref(value), "memory_format": _FORMAT}
                tensor = self.values[value]
                clone = "aten.clone.default"
                self.copies[key] = self.made(op, clone, how, tensor.shape, tensor.dtype, role).id
            copies[value] = self.copies[key]
        return reading_others(op, copies)

    def _is_needless(self, op: Op) -> bool:
        """Whether an op is a copy whose operand serves its readers as well; then that is read."""
        asked = op.function == "clone" or op.arguments.get("memory_format") != _FORMAT
        if op.name != "aten.clone" or (asked and op.id not in self.gone) or reads_across(op):
            return False
        (made,), (source,), flow = op.outputs, op.inputs, self.flow
        copy, now = self.graph.values[made], self.values[source]
        if made in flow.escaping or flow.writers.get(made):
            return False
        fits = op.id in self.gone or same_strides(copy.shape, now.stride, copy.stride)
        if not fits and not all(
            user.kind == "view" and relaid(self.graph.values[v], copy, now.stride)
            for user in flow.users[made]
            for v in user.outputs
        ):
            return False
        self._set(made, now.stride, now.storage)
        self.instead[made] = self.instead.get(source, source)
        return True


def _is_elementwise(op: Op) -> bool:
    rule = find_rule(op.target)
    return rule is not None and rule.fusion == "pointwise" and "memory_format" not in op.arguments
