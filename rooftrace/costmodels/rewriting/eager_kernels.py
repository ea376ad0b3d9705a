"""Passes that remove dead ops and write out the several kernels that eager PyTorch launches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Protocol, TypeVar

from msgspec.structs import replace

from rooftrace.costmodels.fusion.traffic import has_channels_last
from rooftrace.costmodels.ops.cost import BESIDE
from rooftrace.costmodels.rewriting.editing import Editor, Match
from rooftrace.costmodels.rewriting.places import Places, same_steps
from rooftrace.hardware.precisions import storage_bytes
from rooftrace.tracer.graph import Argument, Op, OpGraph, Ref, Tensor, in_order, marks, refs


def without_dead_ops(graph: OpGraph) -> tuple[OpGraph, int]:
    """Remove ops that neither make an output nor write into something that outlives the step.

    Returns the graph and how many kernels were left out.
    """
    kept = _used(graph)
    if len(kept) == len(graph.ops):
        return graph, 0
    smaller = graph.with_ops(kept)
    return smaller, _launched(graph) - _launched(smaller)


def with_matches(
    graph: OpGraph,
    matches: Mapping[int, Match],
    emit: Callable[[Editor, Match], object],
    dropped: Container[int] = (),
) -> tuple[OpGraph, int]:
    """The graph with what `emit` writes in the place of each match, by the id of its op, and how
    often these ops ran; ops that are dropped, or left without a use, are gone."""
    if not matches:
        return graph, 0
    edit = Editor(graph)
    edit.rewrite(matches, partial(emit, edit), dropped)
    count = sum(graph.times(graph.ops[place]) for place in matches)
    return without_left_behind(edit.done(), graph), count


class Found(Protocol):
    """What an op was found to end.  inside: the ops that go with it, by their ids."""

    @property
    def inside(self) -> frozenset[int]: ...


Seen = TypeVar("Seen", bound=Found)


def rewritten(
    graph: OpGraph,
    names: Collection[str],
    find: Callable[[Places, Op], Seen | None],
    emit: Callable[[Places, Editor, Seen], object],
) -> tuple[OpGraph, int]:
    """The graph with what `emit` writes for each op of these names of which `find` says what it
    ends, in its place and in that of the ops inside, and how often these ops ran."""
    places = Places(graph)
    there = {
        op.id: seen
        for op in graph.ops
        if op.name in names and (seen := find(places, op)) is not None
    }
    gone = {number for seen in there.values() for number in seen.inside}
    return with_matches(graph, there, partial(emit, places), gone)


def without_left_behind(graph: OpGraph, before: OpGraph) -> OpGraph:
    """Remove the ops that a rewrite of `before` left without a use; unused ones of `before` stay.

    Values keep their ids in a rewrite, so an op is known by the values that it makes.
    """
    used_before = {op.outputs for op in _used(before)}
    unused_before = {op.outputs for op in before.ops} - used_before
    used = {op.id for op in _used(graph)}
    kept = [op for op in graph.ops if op.id in used or op.outputs in unused_before]
    kept = _without_unread_views(graph, kept, _read(before, before.ops))
    gone = before.producers.keys() - {value for op in kept for value in op.outputs}
    gone |= set(before.external) & _read(before, before.ops) - _read(graph, kept)
    return graph.with_ops(_letting_go(op, gone) for op in kept)


def letting_go(graph: OpGraph, before: OpGraph) -> OpGraph:
    """The graph without the values that an op made in `before`, and that none makes any more,
    among those that ops hold."""
    gone = before.producers.keys() - graph.producers.keys()
    if not gone:
        return graph
    return graph.replace(ops=tuple(_letting_go(op, gone) for op in graph.ops))


def _read(graph: OpGraph, ops: Sequence[Op]) -> set[int]:
    """The values that ops read, here or in a neighbouring iteration, and those that leave."""
    read = {value for op in ops for value in op.inputs} | set(graph.outputs)
    neighbours = [ref.then for op in ops for ref in op.reads]
    neighbours += [tensor.then for tensor in graph.values]
    return read | {then.value for then in neighbours if then is not None}


def _without_unread_views(graph: OpGraph, ops: list[Op], before: Set[int]) -> list[Op]:
    """Ops without the views that nothing reads any more, among those that were read `before`.

    Views of what comes from outside are kept by `_used`, since they may be written.
    """
    while True:
        read = _read(graph, ops)
        kept = [
            op
            for op in ops
            if op.kind != "view"
            or before.isdisjoint(op.outputs)
            or any(i in read or graph.values[i].storage == i for i in op.outputs)
        ]
        if len(kept) == len(ops):
            return kept
        ops = kept


def _letting_go(op: Op, gone: Collection[int]) -> Op:
    """The op without the values in `gone` among those that it holds."""
    if not op.holds or not any(ref.id in gone for ref in op.holds):
        return op
    return replace(op, holds=tuple(ref for ref in op.holds if ref.id not in gone))


def _used(graph: OpGraph) -> list[Op]:
    """The ops that make an output, or write into something that outlives the step."""
    across: set[tuple[int, int]] = set()
    while True:  # an iteration also makes what the next iteration reads
        kept = _needed(graph, across)
        more = {pair for op in kept if op.repeats for pair in _read_across(graph, op)}
        if more <= across:
            return kept
        across |= more


def _needed(graph: OpGraph, across: Collection[tuple[int, int]]) -> list[Op]:
    """The ops that make an output, or write what a later op reads.

    across: repeats, and storages that the next iteration reads when one of the repeat has ended.
    """
    storage = [t.storage for t in graph.values]
    live = {storage[i] for i in (*graph.outputs, *graph.external)}
    inside: tuple[int, ...] = ()
    eager = marks.eager_ops(graph.ops)
    kept = []
    for op in reversed(graph.ops):
        if op.repeats != inside:
            entered = set(op.repeats) - set(inside)
            live.update(value for repeat, value in across if repeat in entered)
            inside = op.repeats
        made = [storage[i] for i in op.outputs]
        beside = "writes" in op.facts  # it overwrites an operand, too
        if beside or op.id in eager or not made or not live.isdisjoint(made) or op.kind == "sync":
            kept.append(op)
            live.update([storage[i] for i in op.inputs])
    return kept[::-1]


def _read_across(graph: OpGraph, op: Op) -> Iterator[tuple[int, int]]:
    """Repeats, and storages that an op of one iteration takes from the iteration beside it: of a
    neighbour, or of what all iterations share."""
    values = graph.values
    neighbours = [ref.then for ref in op.reads]
    neighbours += [values[i].then for i in (*op.inputs, *op.outputs)]
    for then in neighbours:
        if then is not None:
            yield then.repeat, values[then.value].storage
    for repeat in op.repeats:
        for storage in (values[i].storage for i in op.inputs):
            if repeat not in values[storage].repeats:
                yield repeat, storage


def _launched(graph: OpGraph) -> int:
    return sum(graph.times(op) for op in graph.kernels())


# -- eager kernels ---------------------------------------------------------------------------------
# Ops as eager PyTorch runs them on CUDA, where one op launches more than one kernel.
#
# A meta tensor shows none of it: the kernel behind the op copies an input that is not contiguous,
# or does its work in several steps.  A compiler writes its own kernels, which read any strides,
# so these passes are for executions without fusion.  What they make is for pricing: bytes,
# kernels and memory are those of the library, and the numbers that come out need not be.
#
# Facts are from ATen's sources (aten/src/ATen/native), named beside each.

Form = Callable[[Editor, Op], bool]
"""Writes the kernels of an op into an Editor; False, with nothing written, where it is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerForm:
    """What some ops do on CUDA that their meta form does not show."""

    noun: str  # what the note counts, in the singular
    verb: str
    rest: str  # of the note: "12 inputs get copied in order first, ..."
    apply: Form
    names: frozenset[str]


def with_form(form: EagerForm, mixed: bool, graph: OpGraph) -> tuple[OpGraph, int]:
    """The graph with the kernels of this form, and how often they run.

    mixed: only what stands between compiled graphs has them.
    """
    if form.names.isdisjoint([op.name for op in graph.ops]):
        return graph, 0
    edit, count = Editor(graph), 0
    eager = marks.eager_ops(graph.ops) if mixed else range(len(graph.ops))
    outlets = {graph.values[i].storage for i in graph.outputs}
    for op in graph.ops:
        first = len(edit.ops)
        here = op.id in eager and op.kind == "kernel" and op.name in form.names
        if here and form.apply(edit, op):
            edit.ops[-1] = _holding(edit, edit.ops[first:], outlets)
            count += graph.times(op)
        else:
            edit.ops.append(op)
    return (edit.done(), count) if count else (graph, 0)


def _holding(edit: Editor, kernels: Sequence[Op], outlets: Container[int]) -> Op:
    """The last kernel of an op.  Until it is done the op has what it was given, and what its other
    kernels made.  outlets: storages of outputs of the graph, which are there anyhow."""
    *others, last = kernels
    own = {edit.values[i].storage for i in (*last.inputs, *last.outputs)}
    there = (ref for op in others for ref in (*op.reads, *map(Ref, op.outputs)))
    places = ((ref, edit.values[ref.id].storage) for ref in there)
    held = (ref for ref, place in places if place not in own and place not in outlets)
    return replace(last, holds=in_order((*last.holds, *held)))


# -- copies in order -------------------------------------------------------------------------------

_ANY_ORDER = {
    # cuda/layer_norm_kernel.cu: `expect_contiguous` of the input, and of its gradient.
    "aten.native_layer_norm": ("input",),
    "aten.native_layer_norm_backward": ("grad_out", "input"),
    "rooftrace.rms_norm": ("input",),
    "rooftrace.rms_norm_backward": ("grad_out", "input"),
    # cuda/SoftMax.cu: host_softmax and host_softmax_backward.
    "aten._softmax": ("self",),
    "aten._log_softmax": ("self",),
    "aten._softmax_backward_data": ("output",),
    "aten._log_softmax_backward_data": ("grad_output", "output"),
    # cuda/ScanUtils.cuh: scan_dim and scan_dim_with_indices.
    "aten.cumsum": ("self",),
    "aten.cumprod": ("self",),
    "aten.cummax": ("self",),
    "aten.cummin": ("self",),
    "aten.logcumsumexp": ("self",),
    # cuda/TensorTransformations.cu: roll_cuda.  cuda/TensorTopK.cpp: topk_out_with_sort.
    "aten.roll": ("self",),
    "aten.topk": ("self",),
}
"""Operands that must be contiguous, by op."""
_IMAGES = {
    # Convolution.cpp: `input.contiguous(backend_memory_format)`, and the gradient's.
    "aten.convolution": ("input",),
    "aten.convolution_backward": ("grad_output", "input"),
    # cuda/DilatedMaxPool2d.cu, AveragePool2d.cu, AdaptiveAveragePooling.cu.
    "aten.max_pool2d_with_indices": ("self",),
    "aten.avg_pool2d": ("self",),
    "aten._adaptive_avg_pool2d": ("self",),
    # cuda/UpSampleBilinear2d.cu, UpSampleNearest2d.cu.
    "aten.upsample_bilinear2d": ("input", "self"),
    "aten.upsample_nearest2d": ("input", "self"),
}
"""Operands that must be contiguous, with channels first or last."""


def _copied_in_order(edit: Editor, op: Op) -> bool:
    """Copies of operands that the kernel reads in order only."""
    strict = op.name in _ANY_ORDER
    fits = is_in_order if strict else _in_either_order
    names = _ANY_ORDER[op.name] if strict else _IMAGES[op.name]
    copies: dict[str, Argument] = {}
    for name in names:
        item = op.arguments.get(name)
        if isinstance(item, Ref) and not fits(edit.values[item.id]):
            value = edit.values[item.id]
            out = edit.value(value.shape, value.dtype, "temporary", op.repeats)
            wanted = {"self": item, "memory_format": "memory_format:torch.contiguous_format"}
            _beside(edit, op, "aten.clone.default", wanted, out)
            copies[name] = Ref(out)
    if not copies:
        return False
    _last(edit, op, {**op.arguments, **copies})
    return True


def is_in_order(value: Tensor) -> bool:
    """Whether elements lie side by side in the order of their indices."""
    if not value.elements:
        return True
    return same_steps(value.shape, value.stride, Tensor.contiguous(value.shape))


def _in_either_order(value: Tensor) -> bool:
    """Whether an image is contiguous with its channels first, or last."""
    if is_in_order(value) or not value.elements:
        return True
    if not has_channels_last(value):
        return False
    n, channels, *places = value.shape
    last = Tensor.contiguous((n, *places, channels))
    return same_steps(value.shape, value.stride, (last[0], last[-1], *last[1:-1]))


# -- another precision first -------------------------------------------------------------------

_SUMS = frozenset({"aten.sum", "aten.nansum", "aten.prod", "aten.mean", "aten.linalg_vector_norm"})
_SCANS = frozenset({"aten.cumsum", "aten.cumprod"})
_HALVES = ("fp16", "bf16")


def _cast_first(edit: Editor, op: Op) -> bool:
    """A copy in the precision of the result.

    ReduceOpsUtils.h, make_reduction_from_ty: `self.to(in_dtype)`, where in_dtype is that of the
    result unless a half is summed to fp32.  ReduceOps.cpp, impl_func_cum_ops: scans always.
    """
    item = op.arguments.get("self")
    if not isinstance(item, Ref):
        return False
    value, dtype = edit.values[item.id], edit.values[op.outputs[0]].dtype
    fused = op.name in _SUMS and value.dtype in _HALVES and dtype == "fp32"
    if value.dtype == dtype or fused or value.dtype.startswith("complex"):
        return False
    dense = value.nbytes == storage_bytes(value.dtype, value.elements)
    stride = value.stride if dense else None
    out = edit.value(value.shape, dtype, "temporary", op.repeats, stride=stride)
    _beside(edit, op, "aten._to_copy.default", {"self": item, "dtype": f"dtype:{dtype}"}, out)
    _last(edit, op, {**op.arguments, "self": Ref(out)})
    return True


# -- several kernels for one op --------------------------------------------------------------------


def _rolled(edit: Editor, op: Op) -> bool:
    """cuda/TensorTransformations.cu, roll_common: one dimension after the other."""
    item, shifts, dims = (op.arguments.get(name) for name in ("self", "shifts", "dims"))
    if not isinstance(item, Ref) or not isinstance(dims, tuple) or len(dims) < 2:
        return False
    if not isinstance(shifts, tuple) or len(shifts) != len(dims):
        return False
    value = edit.values[op.outputs[0]]
    for shift, dim in zip(shifts[:-1], dims[:-1], strict=True):
        out = edit.value(value.shape, value.dtype, "temporary", op.repeats)
        turn = {"self": item, "shifts": (shift,), "dims": (dim,)}
        _beside(edit, op, "aten.roll.default", turn, out)
        item = Ref(out)
    _last(edit, op, {"self": item, "shifts": shifts[-1:], "dims": dims[-1:]})
    return True


def _biased(edit: Editor, op: Op) -> bool:
    """Convolution.cpp: cuDNN's result, then `add_` of the bias.

    The kernel that ATen has for depthwise convolutions with channels first adds it itself.
    """
    bias, weight = op.arguments.get("bias"), op.arguments.get("weight")
    x = op.arguments.get("input")
    if not (isinstance(bias, Ref) and isinstance(weight, Ref) and isinstance(x, Ref)):
        return False
    image, filters = edit.values[x.id], edit.values[weight.id]
    depthwise = op.arguments.get("groups", 1) > 1 and filters.shape[1] == 1
    if depthwise and not has_channels_last(image):
        return False
    out = op.outputs[0]
    value = edit.values[out]
    plain = edit.view(Ref(out), value.shape, value.stride, op.repeats)
    rest = {name: item for name, item in op.arguments.items() if name != "bias"}
    edit.ops.append(
        replace(op, arguments=rest, inputs=tuple(refs(rest)), outputs=(plain,), flops_torch=None)
    )
    wide = (-1, *(1 for _ in value.shape[2:]))
    channels = edit.values[bias.id].elements
    column = edit.viewed(op, bias, (channels, *wide[1:]))
    _beside(edit, op, "aten.add_.Tensor", {"self": Ref(plain), "other": column}, out)
    return True


def _gradients(edit: Editor, op: Op) -> bool:
    """Convolution.cpp, convolution_backward: input, weight and bias one after the other.

    Each of the first two is a kernel of cuDNN's that reads the gradient of the result, and so does
    the sum for the bias.
    """
    grad, mask = op.arguments.get("grad_output"), op.arguments.get("output_mask")
    if not isinstance(grad, Ref) or not isinstance(mask, tuple) or sum(mask) < 2:
        return False
    places = [place for place, wanted in enumerate(mask) if wanted]
    if len(places) != len(op.outputs):
        return False
    for place, out in zip(places, op.outputs, strict=True):
        if place == _BIAS:
            dims = tuple(d for d in range(len(edit.values[grad.id].shape)) if d != 1)
            _beside(edit, op, "aten.sum.dim_IntList", {"self": grad, "dim": dims}, out)
            continue
        alone = tuple(other == place for other in range(len(mask)))
        edit.emit(op, op.target, {**op.arguments, "output_mask": alone}, (out,), facts=op.facts)
    return True


_BIAS = 2
"""The place of the bias among the gradients of a convolution."""


def _softmax_gradient(edit: Editor, op: Op) -> bool:
    """cuda/SoftMax.cu, softmax_backward_cuda_out: grad * output is a tensor of its own."""
    grad, output = op.arguments.get("grad_output"), op.arguments.get("output")
    if not (isinstance(grad, Ref) and isinstance(output, Ref)):
        return False
    value = edit.values[output.id]
    product = edit.value(value.shape, edit.values[grad.id].dtype, "temporary", op.repeats)
    _beside(edit, op, "aten.mul.Tensor", {"self": grad, "other": output}, product)
    _last(edit, op, {**op.arguments, "grad_output": Ref(product)})
    return True


def _safe_softmax(edit: Editor, op: Op) -> bool:
    """SoftMax.cpp, _safe_softmax: a softmax, and zeros in the rows that are -inf throughout."""
    item, dim = op.arguments.get("self"), op.arguments.get("dim", -1)
    if not isinstance(item, Ref):
        return False
    scores, out = edit.values[item.id], edit.values[op.outputs[0]]
    last = dim % len(scores.shape)
    rows = (*scores.shape[:last], 1, *scores.shape[last + 1 :])

    def made(shape: tuple[int, ...], dtype: str) -> int:
        return edit.value(shape, dtype, "temporary", op.repeats)

    hidden = made(scores.shape, "bool")
    plain = edit.view(Ref(op.outputs[0]), out.shape, out.stride, op.repeats)
    empty, zero = made(rows, "bool"), made((), out.dtype)
    softmax = {"self": item, "dim": dim, "half_to_float": False}
    _beside(edit, op, "aten._softmax.default", softmax, plain)
    _beside(edit, op, "aten.isneginf.default", {"self": item}, hidden)
    reduced = {"self": Ref(hidden), "dim": dim, "keepdim": True}
    _beside(edit, op, "aten.all.dim", reduced, empty)
    _beside(edit, op, "aten.scalar_tensor.default", {"s": 0.0}, zero)
    chosen = {"condition": Ref(empty), "self": Ref(zero), "other": Ref(plain)}
    edit.emit(op, "aten.where.self", chosen, op.outputs, facts=op.facts)
    return True


_TERMS_APART = frozenset({"aten.mse_loss", "aten.smooth_l1_loss", "aten.huber_loss"})
"""Losses that write their terms into a tensor of their own."""
_TERMS_KEPT = frozenset(
    {"aten.mse_loss", "aten.smooth_l1_loss", "aten.binary_cross_entropy", "aten.soft_margin_loss"}
)
"""Losses whose result keeps the bytes of all its terms.

Loss.cpp and cuda/Loss.cu: the result is made for all terms, and resized, which frees nothing.
"""


def _reduced_loss(edit: Editor, op: Op) -> bool:
    """Loss.cpp, cuda/Loss.cu: a kernel for the terms, and their mean or sum."""
    x, target = op.arguments.get("self"), op.arguments.get("target")
    reduction = op.arguments.get("reduction", 1)
    if not (isinstance(x, Ref) and isinstance(target, Ref)) or reduction not in (1, 2):
        return False
    out = op.outputs[0]
    shape = _broadcast(edit.values[x.id].shape, edit.values[target.id].shape)
    if not shape:
        return False
    result = None
    if op.name in _TERMS_KEPT:
        result = edit.view(Ref(out), shape, Tensor.contiguous(shape), op.repeats)
    if result is None or op.name in _TERMS_APART:
        terms = edit.value(shape, edit.values[out].dtype, "temporary", op.repeats)
    else:
        terms = result
    if result not in (None, terms):
        made: dict[str, Argument] = {"size": shape}
        edit.emit(op, "aten.empty.memory_format", made, (result,), kind="view")
    alone = {**op.arguments, "reduction": 0}
    edit.ops.append(replace(op, arguments=alone, outputs=(terms,), flops_torch=None))
    name = "mean" if reduction == 1 else "sum"
    _beside(edit, op, f"aten.{name}.default", {"self": Ref(terms)}, out)
    return True


def _broadcast(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of two that are broadcast."""
    pairs = zip_longest(reversed(first), reversed(second), fillvalue=1)
    return tuple(b if a == 1 else a for a, b in pairs)[::-1]


def _beside(edit: Editor, op: Op, target: str, arguments: Mapping[str, Argument], out: int) -> None:
    edit.emit(op, target, arguments, (out,), facts={BESIDE: op.name})


def _last(edit: Editor, op: Op, arguments: Mapping[str, Argument]) -> None:
    """The op itself, with other arguments."""
    edit.ops.append(replace(op, arguments=dict(arguments), inputs=tuple(refs(arguments))))


EAGER_FORMS = (
    EagerForm(
        noun="roll",
        verb="run",
        rest="as one kernel for each dimension",
        apply=_rolled,
        names=frozenset({"aten.roll"}),
    ),
    EagerForm(
        noun="safe softmax",
        verb="run",
        rest="as a softmax, a search for rows without a key, and a choice",
        apply=_safe_softmax,
        names=frozenset({"aten._safe_softmax"}),
    ),
    EagerForm(
        noun="convolution",
        verb="add",
        rest="the bias in a kernel of its own",
        apply=_biased,
        names=frozenset({"aten.convolution"}),
    ),
    EagerForm(
        noun="softmax gradient",
        verb="run",
        rest="after a product with the probabilities, a kernel of its own",
        apply=_softmax_gradient,
        names=frozenset({"aten._softmax_backward_data"}),
    ),
    EagerForm(
        noun="loss",
        verb="write",
        rest="all its terms first, and reduce them in a kernel of its own",
        apply=_reduced_loss,
        names=_TERMS_APART | _TERMS_KEPT,
    ),
    EagerForm(
        noun="sum or scan",
        verb="read",
        rest="a copy of its input in the precision of the result",
        apply=_cast_first,
        names=_SUMS | _SCANS,
    ),
    EagerForm(
        noun="kernel",
        verb="read",
        rest="a copy in order of an input that is not contiguous",
        apply=_copied_in_order,
        names=frozenset({*_ANY_ORDER, *_IMAGES}),
    ),
    EagerForm(
        noun="convolution",
        verb="make",
        rest="each gradient in a kernel of its own",
        apply=_gradients,
        names=frozenset({"aten.convolution_backward"}),
    ),
)
"""In the order in which they are applied: a kernel that is added may copy its input, and the
gradients of a convolution share such a copy."""
