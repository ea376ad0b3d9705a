"""The named rewrites: what a server runs in place of what a module's code says.

A rewrite is a line of REWRITES.  It is found by structure (ops, shapes, the wiring of values, their
roles), never by the name of a model or a module, and it gives the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rooftrace.costmodels.rewriting.attention_kernels import attention_kernels
from rooftrace.costmodels.rewriting.attention_operands import masks_as_numbers, share_heads
from rooftrace.costmodels.rewriting.caches import static_caches
from rooftrace.costmodels.rewriting.causal_convs import fuse_causal_convs
from rooftrace.costmodels.rewriting.delta_rules import gated_delta_rule, linear_attention
from rooftrace.costmodels.rewriting.duals import fuse_dual_scans
from rooftrace.costmodels.rewriting.editing import Editor, operand
from rooftrace.costmodels.rewriting.expert_kernels import fuse_experts
from rooftrace.costmodels.rewriting.experts import route_experts
from rooftrace.costmodels.rewriting.fused_products import PRODUCTS, fuse_gate_up, fuse_qkv
from rooftrace.costmodels.rewriting.index_scores import fuse_index_scores
from rooftrace.costmodels.rewriting.latent import absorb_latent
from rooftrace.costmodels.rewriting.narrow_products import narrow_operands
from rooftrace.costmodels.rewriting.parallel_scans import fuse_selective_scans
from rooftrace.costmodels.rewriting.places import Places
from rooftrace.costmodels.rewriting.regions import can_be_one
from rooftrace.costmodels.rewriting.routing import fuse_routing
from rooftrace.costmodels.rewriting.unused import without_left_behind
from rooftrace.tracer.arguments import Argument, Ref
from rooftrace.tracer.graph import Op, OpGraph

# -- logits ----------------------------------------------------------------------------------------
# The head of a prompt on its last position alone: a server needs no other logits.


_BY_POSITION = frozenset({
    "aten._to_copy", "aten.mul", "aten.div", "aten.tanh", "aten.add", "aten.clone",
})  # fmt: skip
"""Ops on logits that act on every position alone; their other operands are numbers."""
_VIEWS = frozenset({"aten.view", "aten._unsafe_view", "aten.reshape"})
_LONGEST = 16


@dataclass(frozen=True, slots=True)
class _Head:
    """The product that makes the logits [B S, V], and what is done to them, in order."""

    product: Op
    after: tuple[Op, ...]
    output: int  # the logits [B, S, V] that leave the step


def last_logits(graph: OpGraph) -> tuple[OpGraph, int]:
    """The logits [B, S, V] of a prompt become those of its last position, [B, 1, V].

    It does so where they leave the step and nothing else reads them.
    """
    sizes = tuple(graph.workload.get(name) for name in ("batch", "seq"))
    places = Places(graph)
    heads = [head for output in graph.outputs if (head := _match(places, output, sizes))]
    if len(heads) != 1:
        return graph, 0
    (head,) = heads
    edit, skipped = Editor(graph), {op.id for op in head.after}
    last = head.output
    for op in graph.ops:
        if op.id == head.product.id:
            last = _emit(edit, head)
        elif op.id not in skipped:
            edit.ops.append(op)
    edit.replaced[head.output] = last
    return without_left_behind(edit.done(), graph), 1


def _match(places: Places, output: int, sizes: tuple[object, ...]) -> _Head | None:
    graph = places.graph
    shape = graph.values[output].shape
    if len(shape) != 3 or shape[:2] != sizes or shape[1] < 2:
        return None
    value, after = output, list[Op]()
    for _ in range(_LONGEST):
        op = places.made_by(value)
        if op is None or op.repeats:
            return None
        rows = (shape[0] * shape[1], shape[2])
        if op.name in PRODUCTS:
            inputs = graph.values[operand(op, PRODUCTS[op.name]).id]
            plain = graph.values[op.outputs[0]].shape == rows and inputs.shape[0] == rows[0]
            inside = frozenset({op.id, *(later.id for later in after)})
            alone = can_be_one(places, inside, (output,), ()) and not places.read_by[output]
            return _Head(op, tuple(reversed(after)), output) if plain and alone else None
        source = graph.values[op.inputs[0]].shape if op.inputs else ()
        if len(op.inputs) != 1 or source not in (shape, rows):
            return None
        if op.name not in _VIEWS and (op.name not in _BY_POSITION or source != shape):
            return None
        after.append(op)
        value = op.inputs[0]
    return None


def _emit(edit: Editor, head: _Head) -> int:
    """The product of the last rows, and what is done to it; returns the new logits."""
    op, (batch, length, size) = head.product, edit.values[head.output].shape
    name = PRODUCTS[op.name]
    rows = operand(op, name)
    source = edit.values[rows.id]
    down, across = source.stride
    whole = edit.viewed(op, rows, (batch, length, source.shape[1]), (length * down, down, across))
    last = edit.sliced(op, whole, 1, length - 1, length)
    flat = edit.viewed(op, last, (batch, source.shape[1]), (length * down, across))
    arguments: Mapping[str, Argument] = {**op.arguments, name: flat}
    out = edit.values[op.outputs[0]]
    made = edit.made(op, op.target, arguments, (batch, size), out.dtype, out.role).id
    now = {op.outputs[0]: made}
    for later in head.after:
        old = edit.values[later.outputs[0]]
        (source_id,) = later.inputs
        shape = (batch, 1, size) if len(old.shape) == 3 else (batch, size)
        if later.kind == "view":
            made = edit.viewed(later, Ref(now[source_id]), shape).id
        else:
            changed = {
                key: Ref(now[item.id]) if isinstance(item, Ref) else item
                for key, item in later.arguments.items()
            }
            made = edit.value(shape, old.dtype, old.role, later.repeats)
            edit.emit(later, later.target, changed, (made,), facts=later.facts)
        now[later.outputs[0]] = made
    return made


# -- table -----------------------------------------------------------------------------------------


INFERENCE = ("forward", "prefill", "decode", "requests")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """A named change of the graph that leaves its results as they are."""

    name: str  # as in `ExecutionModel.rewrites`
    meaning: str  # one sentence for who asks what it does
    apply: Callable[[OpGraph], tuple[OpGraph, int]]  # the new graph, and how many places changed
    noun: str  # what is changed, in the singular
    phases: tuple[str, ...] = INFERENCE  # where it applies


REWRITES = (
    Rewrite(
        name="routed-experts",
        meaning="Experts that compute every token, and weigh most by zero, compute the tokens "
        "routed to them.",
        apply=route_experts,
        noun="expert layer",
    ),
    Rewrite(
        name="written-attention",
        meaning="Attention that is written out, with sinks and soft caps too, is one kernel.",
        apply=attention_kernels,
        noun="attention",
    ),
    Rewrite(
        name="shared-heads",
        meaning="Query heads that share keys and values read them as stored, not a copy for each.",
        apply=share_heads,
        noun="attention",
    ),
    Rewrite(
        name="mask-numbers",
        meaning="Masks that a kernel knows by numbers (causal, a window, chunks, lengths) are not "
        "read.",
        apply=masks_as_numbers,
        noun="attention",
    ),
    Rewrite(
        name="causal-conv1d",
        meaning="A causal convolution of each channel runs as one kernel, with its state and SiLU.",
        apply=fuse_causal_convs,
        noun="causal convolution",
    ),
    Rewrite(
        name="selective-scan",
        meaning="A recurrence whose state numbers decay each by itself runs as one kernel.",
        apply=fuse_selective_scans,
        noun="selective scan",
    ),
    Rewrite(
        name="ssd",
        meaning="A recurrence with one decay for each head runs as the kernels of state-space "
        "duality.",
        apply=fuse_dual_scans,
        noun="state-space layer",
    ),
    Rewrite(
        name="gated-delta-rule",
        meaning="A state that is corrected towards each value, in chunks or token by token, runs "
        "as the kernels of flash-linear-attention.",
        apply=gated_delta_rule,
        noun="delta rule",
    ),
    Rewrite(
        name="linear-attention",
        meaning="A decaying state to which keys and values are added, in chunks or token by token, "
        "runs as the kernels of flash-linear-attention.",
        apply=linear_attention,
        noun="linear attention",
    ),
    Rewrite(
        name="fused-routing",
        meaning="What is written out between the logits of a router and the experts of each token, "
        "with their weights, is one kernel.",
        apply=fuse_routing,
        noun="router",
    ),
    Rewrite(
        name="fused-experts",
        meaning="Products of routed experts take and put back their rows by number, as the kernels "
        "of a server.",
        apply=fuse_experts,
        noun="expert layer",
    ),
    Rewrite(
        name="index-scores",
        meaning="Scores by which sparse attention chooses keys are added up over heads before they "
        "are written.",
        apply=fuse_index_scores,
        noun="indexer",
    ),
    Rewrite(
        name="absorb-latent",
        meaning="Attention runs on the cached latents: the projection of the cache is multiplied "
        "into query and output.",
        apply=absorb_latent,
        noun="attention",
    ),
    Rewrite(
        name="fused-qkv",
        meaning="Products of one input that all reach one attention are one product.",
        apply=fuse_qkv,
        noun="qkv projection",
    ),
    Rewrite(
        name="fused-gate-up",
        meaning="Two products of one input whose results are multiplied are one product.",
        apply=fuse_gate_up,
        noun="gate-up projection",
    ),
    Rewrite(
        name="narrow-operands",
        meaning="A product of numbers that were widened for it reads them narrow, and writes wide "
        "results.",
        apply=narrow_operands,
        noun="product",
    ),
    Rewrite(
        name="last-logits",
        meaning="A prompt has the logits of its last position only.",
        apply=last_logits,
        noun="head",
        phases=("prefill",),
    ),
    Rewrite(
        name="static-cache",
        meaning="New rows are written into a cache that has room, where a `cat` copies the cache.",
        apply=static_caches,
        noun="cache append",
        phases=("prefill", "decode", "requests"),
    ),
)
"""Every rewrite, in the order in which they are applied."""
