"""Graph rewrites: the table of named ones, the last logits of a prompt, and storage precisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from rooftrace.costmodels.fusion import SUMMARIES, ExecutionModel, execution_model
from rooftrace.costmodels.ops import Access, Cost, Work
from rooftrace.costmodels.rewrites.attention_kernels import (
    attention_kernels,
    flash_from_products,
    masks_as_numbers,
    share_heads,
    with_libraries,
    with_pairs,
)
from rooftrace.costmodels.rewrites.attention_products import materialise_attention
from rooftrace.costmodels.rewrites.causal_convs import fuse_causal_convs, fuse_index_scores
from rooftrace.costmodels.rewrites.delta_rules import gated_delta_rule, linear_attention
from rooftrace.costmodels.rewrites.duals import fuse_dual_scans, fuse_selective_scans
from rooftrace.costmodels.rewrites.eager_kernels import EAGER_FORMS, with_form
from rooftrace.costmodels.rewrites.editing import (
    Editor,
    operand,
    released,
    without_dead_ops,
    without_left_behind,
)
from rooftrace.costmodels.rewrites.expert_kernels import fuse_experts
from rooftrace.costmodels.rewrites.experts import route_experts
from rooftrace.costmodels.rewrites.fused_products import (
    PRODUCTS,
    append_in_place,
    fuse_gate_up,
    fuse_qkv,
    narrow_operands,
    static_caches,
)
from rooftrace.costmodels.rewrites.latent import absorb_latent
from rooftrace.costmodels.rewrites.patterns import can_be_one
from rooftrace.costmodels.rewrites.places import ValueFlow
from rooftrace.costmodels.rewrites.routing import fuse_routing
from rooftrace.graph import Argument, Op, OpGraph, Ref, Tensor
from rooftrace.hardware.precisions import PrecisionError, precision
from rooftrace.hardware.units import format_flops, format_traffic, plural

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
    flow = ValueFlow(graph)
    heads = [head for output in graph.outputs if (head := _match(flow, output, sizes))]
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


def _match(flow: ValueFlow, output: int, sizes: tuple[object, ...]) -> _Head | None:
    graph = flow.graph
    shape = graph.values[output].shape
    if len(shape) != 3 or shape[:2] != sizes or shape[1] < 2:
        return None
    value, after = output, list[Op]()
    for _ in range(_LONGEST):
        op = flow.producer(value)
        if op is None or op.repeats:
            return None
        rows = (shape[0] * shape[1], shape[2])
        if op.name in PRODUCTS:
            inputs = graph.values[operand(op, PRODUCTS[op.name]).id]
            plain = graph.values[op.outputs[0]].shape == rows and inputs.shape[0] == rows[0]
            inside = frozenset({op.id, *(later.id for later in after)})
            alone = can_be_one(flow, inside, (output,), ()) and not flow.users[output]
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
# The named rewrites: what a server runs in place of what a module's code says.
#
# A rewrite is a line of REWRITES.  It is found by structure (ops, shapes, the wiring of values,
# their roles), never by the name of a model or a module, and it gives the same results.


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


# -- rewrites --------------------------------------------------------------------------------------
# Graph to graph: the same step as another execution model would run it, or in other precisions.
#
# Every pass takes a verified OpGraph and returns one.  `rewrite` applies what an execution model
# asks for; `reprice` changes storage precisions.

WRITTEN = "written-attention"
Change = Callable[[OpGraph], tuple[OpGraph, int]]
Price = Callable[[OpGraph], Sequence[Cost]]
"""What each op of a graph costs, once."""


def rewrite(
    graph: OpGraph, execution: ExecutionModel, price: Price | None = None
) -> tuple[OpGraph, tuple[str, ...]]:
    """`graph` as this execution model runs it, and what was changed, one sentence each.

    price: what ops cost; with it, the sentence on a named rewrite says what was saved.
    """
    captured = graph
    detected = execution.fusion == "detected"
    notes: list[str] = []

    def change(wanted: bool, apply: Change, noun: str, verb: str, rest: str) -> None:
        nonlocal graph
        graph, count = apply(graph) if wanted else (graph, 0)
        if count:
            noun, verb = (noun, f"{verb}s") if count == 1 else (f"{noun}s", verb)
            notes.append(f"{count} {noun} {verb} {rest}")

    asked = [entry for entry in REWRITES if entry.name in execution.rewrites]
    named = any(entry.name == WRITTEN and _can_apply(entry, graph) for entry in asked)
    change(
        execution.attention == "flash" and detected and not named,
        flash_from_products,
        "hand-written attention",
        "run",
        "as flash attention",
    )
    for entry in asked:
        graph, note = _named(graph, entry, execution, price)
        notes += note
    graph = with_pairs(graph)
    change(
        execution.attention == "materialised",
        materialise_attention,
        "attention call",
        "run",
        "as matrix products with the score matrix in HBM",
    )
    change(
        execution.kv_append == "in-place" and "static-cache" not in execution.rewrites,
        append_in_place,
        "cache append",
        "write",
        "the new rows only, into a cache that has room",
    )
    graph, _ = with_libraries(graph)
    mixed = execution.dispatch == "mixed"
    for form in EAGER_FORMS:
        wanted = execution.beside and (execution.fusion == "none" or mixed)
        change(wanted, partial(with_form, form, mixed), form.noun, form.verb, form.rest)
    change(
        detected,
        without_dead_ops,
        "op",
        "disappear",
        "because nothing uses the result, as in a compiler",
    )
    if graph is not captured:
        graph = released(graph, captured).verify()
    return graph, tuple(notes)


def _named(
    graph: OpGraph, entry: Rewrite, execution: ExecutionModel, price: Price | None
) -> tuple[OpGraph, tuple[str, ...]]:
    """The graph after a named rewrite, and a sentence on what was changed and saved.

    Where nothing is changed, a sentence says so, unless the preset of this name asks for it or all
    rewrites are asked for.
    """
    own = execution_model(execution.name).rewrites if execution.name in SUMMARIES else ()
    everything = execution.rewrites == tuple(other.name for other in REWRITES)
    silent = everything or entry.name in own
    if _left_out(entry, execution):
        return graph, (f"{entry.name}: left out, since attention runs as matrix products",)
    applies = _can_apply(entry, graph)
    result, count = entry.apply(graph) if applies else (graph, 0)
    if not count:
        where = "" if applies else f" in {graph.phase}"
        return graph, () if silent else (f"{entry.name}: nothing to rewrite{where}",)
    changed = plural(count, entry.noun)
    if price is None:
        return result, (f"{entry.name}: {changed}",)
    before, after = _prices_of_changes(graph, result, price)
    saved = [
        f"{written(a)} -> {written(b)}"
        for written, a, b in (
            (format_flops, before.flops(), after.flops()),
            (format_traffic, before.bytes(), after.bytes()),
        )
        if a != b
    ]
    return result, (", ".join((f"{entry.name}: {changed}", *saved)),)


def _left_out(entry: Rewrite, execution: ExecutionModel) -> bool:
    """Whether an execution model rules a rewrite out."""
    return entry.name in ("absorb-latent", WRITTEN) and execution.attention == "materialised"


def _can_apply(entry: Rewrite, graph: OpGraph) -> bool:
    """Whether a rewrite is for graphs like this one: of its phases, and without a backward."""
    return graph.phase in entry.phases and all(op.part == "forward" for op in graph.ops)


def applicable(graph: OpGraph, execution: ExecutionModel) -> tuple[str, ...]:
    """Names of the rewrites that would change `graph`, and that `execution` does not ask for yet.

    graph: with the family of each op.
    """
    open_ones = [
        entry
        for entry in REWRITES
        if entry.name not in execution.rewrites
        and not _left_out(entry, execution)
        and _can_apply(entry, graph)
    ]
    if open_ones and execution.attention == "flash" and execution.fusion == "detected":
        graph, _ = flash_from_products(graph)
    return tuple(entry.name for entry in open_ones if entry.apply(graph)[1])


def _prices_of_changes(graph: OpGraph, result: OpGraph, price: Price) -> tuple[Cost, Cost]:
    """What the ops cost that a rewrite removed, and those that it put in their place.

    Values keep their ids, so an op is known by its name and by the values that it makes; one that
    reads something else is another one where it then costs something else.
    """
    priced = [
        {
            (op.target, op.outputs): (cost, cost.flops(), cost.bytes(), side.times(op))
            for op, cost in zip(side.ops, price(side), strict=True)
        }
        for side in (graph, result)
    ]
    same = {
        key for key, (_, *sizes) in priced[0].items() if sizes == list(priced[1].get(key, ()))[1:]
    }
    sums = []
    for side in priced:
        work: Counter[Work] = Counter()
        traffic: Counter[Access] = Counter()
        for cost, _, _, times in (side[key] for key in side.keys() - same):
            for kind, flop in cost.work.items():
                work[kind] += flop * times
            for access, size in cost.traffic.items():
                traffic[access] += size * times
        sums.append(Cost(work, traffic))
    return sums[0], sums[1]


# -- precisions ------------------------------------------------------------------------------------


def check_precisions(dtype: str | None, *others: str | None) -> None:
    """Raise PrecisionError unless `dtype` is a float, the others floats or integers up to 8 bits.

    None is fine.
    """
    for name in (dtype, *others):
        if name is not None and not _can_hold(name, integers=True):
            raise PrecisionError(
                f'precision "{name}": expected a float, or an integer of at most '
                "8 bits, for example bf16 or int4"
            )
    if dtype is not None and not _can_hold(dtype, integers=False):
        raise PrecisionError(
            f'precision "{dtype}": expected a float, for example fp8; integers '
            "are for weights or caches alone"
        )


def _can_hold(name: str, integers: bool) -> bool:
    known = precision(name)
    return known.kind == "float" or (integers and known.kind == "int" and known.bits <= 8)


def reprice(
    graph: OpGraph,
    dtype: str | None = None,
    weights_dtype: str | None = None,
    kv_dtype: str | None = None,
) -> OpGraph:
    """Change the storage precisions of a graph; its ops stay.

    dtype: of every float in the model's own precision (`graph.model["dtype"]`).  Tensors that are
    explicitly in another floating precision (fp32 norms, routers, logits) stay as they are and are
    counted in `model["islands"]`.  Integers, optimizer states and the optimizer's own tensors stay
    too.  weights_dtype, kv_dtype: of tensors of that role, instead of `dtype`.  Without any
    precision for them, in this call or an earlier one, each weight takes the format that its
    checkpoint declares (`Tensor.stored`), and a cache that of `workload["declared_kv_dtype"]`; not
    in training, as no optimizer updates quantised weights.
    Raises PrecisionError for an unknown name, or a precision that values cannot have.
    """
    OpGraph.check(graph, "reprice")
    first = dtype is None and "priced_dtype" not in graph.model
    declared = first and weights_dtype is None and _declares(graph)
    if first and kv_dtype is None:
        kv_dtype = graph.workload.get("declared_kv_dtype")
    if dtype is None and weights_dtype is None and kv_dtype is None and not declared:
        return graph
    check_precisions(dtype, weights_dtype, kv_dtype)
    own = str(graph.model.get("priced_dtype") or graph.model.get("dtype", "fp32"))
    by_role = {"weights": weights_dtype or dtype, "kv": kv_dtype or dtype}
    fixed = _optimizers_own(graph)
    values: list[Tensor] = []
    islands: Counter[str] = Counter()
    for index, tensor in enumerate(graph.values):
        owner = graph.values[tensor.storage]
        wanted = (owner.stored if declared else "") or by_role.get(owner.role, dtype)
        stays = wanted is None or tensor.storage in fixed
        if tensor.dtype == own and not stays:
            values.append(replace(tensor, dtype=precision(wanted or own).name))
            continue
        if (
            tensor.dtype != own
            and tensor.storage == index
            and not stays
            and precision(tensor.dtype).kind == "float"
        ):
            islands[tensor.dtype] += graph.times(tensor)
        values.append(tensor)
    model = {
        **graph.model,
        "priced_dtype": dtype or own,
        "islands": dict(islands),
        "bytes_parameters": _parameter_bytes(graph, values, declared),
    }
    asked = {"dtype": dtype, "weights_dtype": weights_dtype, "kv_dtype": kv_dtype}
    workload = {
        **graph.workload,
        **{name: chosen or graph.workload.get(name) for name, chosen in asked.items()},
    }
    return graph.replace(values=tuple(values), model=model, workload=workload)


def _optimizers_own(graph: OpGraph) -> frozenset[int]:
    """Storages of optimizer states and masters, and those that the optimizer makes for itself.

    Among the latter are its fp32 copies of low-precision gradients.
    """
    made = {i for op in graph.ops if op.part == "optimizer" for i in op.outputs}
    return frozenset(
        index
        for index, tensor in enumerate(graph.values)
        if tensor.storage == index and (tensor.role == "optimizer" or index in made)
    )


def _declares(graph: OpGraph) -> bool:
    """Whether the checkpoint declares formats that hold for this step."""
    return "bytes_stored" in graph.model and graph.phase != "training"


def _parameter_bytes(graph: OpGraph, values: list[Tensor], declared: bool) -> int:
    """Bytes of all parameters with these values; unread ones change like those that are read."""
    if declared:
        return int(graph.model["bytes_stored"])
    own = new = 0
    for index in graph.external:
        if graph.values[index].role == "weights" and graph.values[index].storage == index:
            copies = graph.times(graph.values[index])
            own += copies * graph.values[index].nbytes
            new += copies * values[index].nbytes
    total = int(graph.model.get("bytes_parameters", own))
    return round(total * new / own) if own else total
