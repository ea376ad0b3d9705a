"""Graph rewrites: the table of named ones, the last logits of a prompt, and storage precisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from rooftrace.costmodels.fusion import SUMMARIES, ExecutionModel, execution_model
from rooftrace.costmodels.ops import Access, Cost, Work, places_in
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
from rooftrace.costmodels.rewrites.dataflow import ValueFlow, clipped, reads_across
from rooftrace.costmodels.rewrites.delta_rules import gated_delta_rule, linear_attention
from rooftrace.costmodels.rewrites.duals import fuse_dual_scans, fuse_selective_scans
from rooftrace.costmodels.rewrites.eager_kernels import EAGER_FORMS, with_form
from rooftrace.costmodels.rewrites.editing import (
    Editor,
    operand,
    released,
    with_matches,
    without_dead_ops,
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
from rooftrace.costmodels.rewrites.patterns import can_be_one, fuse_routing
from rooftrace.graph import Argument, Op, OpGraph, Ref, Tensor
from rooftrace.hardware.precisions import PrecisionError, precision
from rooftrace.hardware.units import format_flops, format_traffic, plural

# -- logits ----------------------------------------------------------------------------------------
# The head of a prompt on its last position alone: a server needs no other logits.


_BY_POSITION = frozenset({
    "aten._to_copy", "aten.mul", "aten.div", "aten.tanh", "aten.add", "aten.clone",
})  # fmt: skip
"""Ops on logits that act on every position alone; their other operands are numbers."""
_VIEWS = frozenset({"aten.view", "aten._unsafe_view", "aten.reshape", "aten.slice"})
_GATHER = "_c10d_functional.all_gather_into_tensor"
_LONGEST = 16


@dataclass(frozen=True, slots=True)
class _LogitsHead:
    """The product that makes the logits [B S, V], and the ops on them, in order."""

    product: Op
    after: tuple[Op, ...]
    output: int  # the logits [B, S, V] that leave the step, or of which one position is read
    read: Op | None = None  # the only reader, which takes that position


def last_logits(graph: OpGraph) -> tuple[OpGraph, int]:
    """The logits [B, S, V] of a prompt become those of its last position, [B, 1, V].

    It does so where they leave the step of a prompt and nothing else reads them, and for those of
    which the code reads one position alone.
    """
    sizes = tuple(graph.workload.get(name) for name in ("batch", "seq"))
    flow = ValueFlow(graph)
    whole = graph.outputs if graph.phase == "prefill" else ()
    heads = [_head(flow, out) for out in whole if flow.values[out].shape[:2] == sizes]
    heads += [_head(flow, op.inputs[0], op) for op in graph.ops if _reads_position(flow, op)]
    heads = [head for head in heads if head is not None]
    if len(heads) != 1 or (head := heads[0]) is None:
        return graph, 0
    gone = {op.id for op in (*head.after, *([head.read] if head.read else []))}
    return with_matches(graph, {head.product.id: head}, _emit, gone)


def _reads_position(flow: ValueFlow, op: Op) -> bool:
    """Whether an op takes one position of [B, S, V]."""
    if op.name not in ("aten.select", "aten.slice") or op.arguments.get("dim") != 1:
        return False
    shape, made = flow.values[op.inputs[0]].shape, flow.values[op.outputs[0]]
    return len(shape) == 3 and made.elements == shape[0] * shape[2] and not reads_across(op)


def _head(flow: ValueFlow, output: int, read: Op | None = None) -> _LogitsHead | None:
    shape = flow.values[output].shape
    if len(shape) != 3 or shape[1] < 2:
        return None
    value, after = output, list[Op]()
    inside, end = set[int](), output  # ops that read nothing but each other, and their result
    for _ in range(_LONGEST):
        op, rows = flow.producer(value), (shape[0] * shape[1], shape[2])
        if op is None or op.repeats:
            return None
        if parts := _gathered(flow, op):
            inside |= {op.id, parts[0].id}
            if not can_be_one(flow, inside, (end,), ()):
                return None
            after += (op, *parts)
            value = end = parts[-1].inputs[0]
            inside, shape = set(), (*shape[:2], flow.values[value].shape[-1])
            continue
        if op.name in PRODUCTS:
            inputs = flow.values[operand(op, PRODUCTS[op.name]).id]
            plain = flow.values[op.outputs[0]].shape == rows and inputs.shape[0] == rows[0]
            users = [] if read is None else [read]
            alone = can_be_one(flow, {op.id, *inside}, (end,), ()) and flow.users[output] == users
            head = _LogitsHead(op, tuple(reversed(after)), output, read)
            return head if plain and alone else None
        source = flow.values[op.inputs[0]].shape if len(op.inputs) == 1 else ()
        if source not in (shape, rows):
            return None
        if op.name not in _VIEWS and (op.name not in _BY_POSITION or source != shape):
            return None
        after.append(op)
        inside.add(op.id)
        value = op.inputs[0]
    return None


def _gathered(flow: ValueFlow, op: Op) -> tuple[Op, Op] | None:
    """The split and the all-gather of the parts of logits that an op puts side by side."""
    split = flow.producer(op.inputs[0]) if op.name == "aten.cat" and op.inputs else None
    if split is None or split.name != "aten.split" or split.outputs != op.inputs:
        return None
    gather = flow.producer(split.inputs[0])
    return (split, gather) if gather is not None and gather.name == _GATHER else None


def _emit(edit: Editor, head: _LogitsHead) -> None:
    """The product of the last rows, and the ops after it."""
    op, (batch, length, _) = head.product, edit.values[head.output].shape
    size = edit.values[op.outputs[0]].shape[1]
    name = PRODUCTS[op.name]
    rows = operand(op, name)
    source = edit.values[rows.id]
    down, across = source.stride
    split = edit.viewed(op, rows, (batch, length, source.shape[1]), (length * down, down, across))
    place = length - 1
    if head.read is not None:
        at = head.read.arguments.get("index", head.read.arguments.get("start"))
        place = clipped(at, length) or 0
    last = edit.sliced(op, split, 1, place, place + 1)
    flat = edit.viewed(op, last, (batch, source.shape[1]), (length * down, across))
    arguments: Mapping[str, Argument] = {**op.arguments, name: flat}
    out = edit.values[op.outputs[0]]
    now = {op.outputs[0]: edit.made(op, op.target, arguments, (batch, size), out.dtype, out.role)}
    for later in head.after:
        made = [edit.values[value] for value in later.outputs]
        shapes = [
            (*old.shape[:1], 1, *old.shape[2:]) if len(old.shape) == 3 else (batch, old.shape[-1])
            for old in made
        ]
        read = now[later.inputs[0]]
        if later.name == "aten.split":
            parts = (
                edit.sliced(later, read, 0, n * batch, (n + 1) * batch) for n in range(len(made))
            )
            now |= dict(zip(later.outputs, parts, strict=True))
        elif later.kind == "view":
            now[later.outputs[0]] = edit.viewed(later, read, shapes[0])
        else:
            changed = {key: _now(item, now) for key, item in later.arguments.items()}
            if later.collective is not None:
                sent = replace(later.collective, bytes=later.collective.bytes // length)
                later = replace(later, collective=sent)
            kept = made[0].dtype, made[0].role, later.facts
            now[later.outputs[0]] = edit.made(later, later.target, changed, shapes[0], *kept)
    if head.read is None:
        edit.replaced[head.output] = now[head.output].id
        return
    (value,) = head.read.outputs
    tensor = edit.values[value]
    edit.values[value] = replace(tensor, stride=Tensor.contiguous(tensor.shape))
    edit.move(value, edit.values[now[head.output].id].storage)
    edit.reshape(head.read, now[head.output], value)


def _now(item: Argument, now: Mapping[int, Ref]) -> Argument:
    """An argument with new values in place of old ones."""
    if isinstance(item, tuple):
        return tuple(_now(part, now) for part in item)
    return now[item.id] if isinstance(item, Ref) else item


# -- table -----------------------------------------------------------------------------------------
# Named rewrites: what a server runs in place of what the code of a module says.
#
# A rewrite is matched by structure (ops, shapes, dataflow, roles), never by the name of a model or
# a module, and its graph gives the same results.  docs/serving.md says what each does.


INFERENCE = ("forward", "prefill", "decode", "requests")


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A named change of the graph that leaves its results as they are."""

    name: str  # as in `ExecutionModel.rewrites`
    apply: Callable[[OpGraph], tuple[OpGraph, int]]  # the new graph, and how often it was changed
    noun: str  # of what is changed, in the singular
    phases: tuple[str, ...] = INFERENCE


REWRITES = (
    Rewrite("routed-experts", route_experts, "expert layer"),
    Rewrite("written-attention", attention_kernels, "attention"),
    Rewrite("shared-heads", share_heads, "attention"),
    Rewrite("mask-numbers", masks_as_numbers, "attention"),
    Rewrite("causal-conv1d", fuse_causal_convs, "causal convolution"),
    Rewrite("selective-scan", fuse_selective_scans, "selective scan"),
    Rewrite("ssd", fuse_dual_scans, "state-space layer"),
    Rewrite("gated-delta-rule", gated_delta_rule, "delta rule"),
    Rewrite("linear-attention", linear_attention, "linear attention"),
    Rewrite("fused-routing", fuse_routing, "router"),
    Rewrite("fused-experts", fuse_experts, "expert layer"),
    Rewrite("index-scores", fuse_index_scores, "indexer"),
    Rewrite("absorb-latent", absorb_latent, "attention"),
    Rewrite("fused-qkv", fuse_qkv, "qkv projection"),
    Rewrite("fused-gate-up", fuse_gate_up, "gate-up projection"),
    Rewrite("narrow-operands", narrow_operands, "product"),
    Rewrite("last-logits", last_logits, "head", phases=("prefill", "forward")),
    Rewrite("static-cache", static_caches, "cache append", ("prefill", "decode", "requests")),
)
"""Every rewrite, in the order of application."""


# -- rewrites --------------------------------------------------------------------------------------
# A pass takes a verified OpGraph and returns one.

WRITTEN = "written-attention"
UNCHANGED = "nothing to rewrite"
"""What the sentence on a named rewrite says that changed nothing."""
Change = Callable[[OpGraph], tuple[OpGraph, int]]
Price = Callable[[OpGraph, Sequence[Op]], Sequence[Cost]]
"""The cost of each of these ops of a graph, once."""


def rewrite(
    graph: OpGraph, execution: ExecutionModel, price: Price | None = None
) -> tuple[OpGraph, tuple[str, ...]]:
    """`graph` as this execution model runs it, and a sentence on each change.

    price: of ops; with it, the sentence on a named rewrite says how much was saved.
    """
    captured = graph
    detected, mixed = execution.fusion == "detected", execution.dispatch == "mixed"
    notes: list[str] = []

    def change(wanted: bool, apply: Change, noun: str, verb: str, rest: str) -> None:
        nonlocal graph
        graph, count = apply(graph) if wanted else (graph, 0)
        if count:
            noun, verb = (noun, f"{verb}s") if count == 1 else (f"{noun}s", verb)
            notes.append(f"{count} {noun} {verb} {rest}")

    chosen = [entry for entry in REWRITES if entry.name in execution.rewrites]
    named = any(entry.name == WRITTEN and _can_apply(entry, graph) for entry in chosen)
    change(
        execution.attention == "flash" and detected and not named,
        partial(flash_from_products, mixed=mixed),
        "hand-written attention",
        "run",
        "as flash attention",
    )
    for entry in chosen:
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
    graph, _ = with_libraries(graph, detected)
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
    """The graph after a named rewrite, and a sentence on the changes and savings.

    A sentence says that nothing was changed, unless the rewrite is of the preset of this name or
    all rewrites are on.
    """
    preset = execution_model(execution.name).rewrites if execution.name in SUMMARIES else ()
    everything = execution.rewrites == tuple(other.name for other in REWRITES)
    silent = everything or entry.name in preset
    if _left_out(entry, execution):
        return graph, (f"{entry.name}: left out, since attention runs as matrix products",)
    applies = _can_apply(entry, graph)
    result, count = entry.apply(graph) if applies else (graph, 0)
    if not count:
        where = "" if applies else f" in {graph.phase}"
        return graph, () if silent else (f"{entry.name}: {UNCHANGED}{where}",)
    changed = plural(count, entry.noun)
    if price is None:
        return result, (f"{entry.name}: {changed}",)
    before, after = _prices_of_changes(graph, result, price)
    sizes = (
        (format_flops, before.flops(), after.flops()),
        (format_traffic, before.bytes(), after.bytes()),
    )
    saved = [f"{shown(a)} -> {shown(b)}" for shown, a, b in sizes if a != b]
    return result, (", ".join((f"{entry.name}: {changed}", *saved)),)


def _left_out(entry: Rewrite, execution: ExecutionModel) -> bool:
    """Whether an execution model rules a rewrite out."""
    return entry.name in ("absorb-latent", WRITTEN) and execution.attention == "materialised"


def _can_apply(entry: Rewrite, graph: OpGraph) -> bool:
    """Whether the graph is of a phase of the rewrite, and without a backward."""
    return graph.phase in entry.phases and all(op.part == "forward" for op in graph.ops)


def applicable(graph: OpGraph, execution: ExecutionModel) -> tuple[str, ...]:
    """Names of the rewrites that would change `graph` and that `execution` does not have.

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
    """The costs of the ops that a rewrite removed, and of those that it added.

    Values keep their ids, so an op is identified by its name and by the values that it makes; if
    its cost differs it was replaced.
    """
    priced = [
        {
            (op.target, op.outputs): (cost, cost.flops(), cost.bytes(), side.times(op))
            for op, cost in zip(ops, price(side, ops), strict=True)
        }
        for side, ops in ((graph, _not_in(graph, result)), (result, _not_in(result, graph)))
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


def _not_in(graph: OpGraph, other: OpGraph) -> list[Op]:
    """The ops of a graph but those that the other one has too."""
    pairs = zip(graph.ops, places_in(graph, other), strict=True)
    return [op for op, place in pairs if place is None]


# -- precisions ------------------------------------------------------------------------------------


def check_precisions(dtype: str | None, *others: str | None) -> None:
    """Raise PrecisionError unless all are floats, or integers of at most 8 bits after the first."""
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
    wanted = precision(name)
    return wanted.kind == "float" or (integers and wanted.kind == "int" and wanted.bits <= 8)


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
    # No optimizer updates quantised weights.
    declares = "bytes_stored" in graph.model and graph.phase != "training"
    declared = first and weights_dtype is None and declares
    if first and kv_dtype is None:
        kv_dtype = graph.workload.get("declared_kv_dtype")
    if dtype is None and weights_dtype is None and kv_dtype is None and not declared:
        return graph
    check_precisions(dtype, weights_dtype, kv_dtype)
    old = str(graph.model.get("priced_dtype") or graph.model.get("dtype", "fp32"))
    by_role = {"weights": weights_dtype or dtype, "kv": kv_dtype or dtype}
    fixed = _of_optimizer(graph)
    values: list[Tensor] = []
    islands: Counter[str] = Counter()
    for index, tensor in enumerate(graph.values):
        owner = graph.values[tensor.storage]
        wanted = (owner.stored if declared else "") or by_role.get(owner.role, dtype)
        stays = wanted is None or tensor.storage in fixed
        if tensor.dtype == old and not stays:
            tensor = replace(tensor, dtype=precision(wanted or old).name)
        elif tensor.storage == index and not stays and precision(tensor.dtype).kind == "float":
            islands[tensor.dtype] += graph.times(tensor)
        values.append(tensor)
    model = {
        **graph.model,
        "priced_dtype": dtype or old,
        "islands": dict(islands),
        "bytes_parameters": _parameter_bytes(graph, values, declared),
    }
    chosen = {"dtype": dtype, "weights_dtype": weights_dtype, "kv_dtype": kv_dtype}
    kept = {name: new or graph.workload.get(name) for name, new in chosen.items()}
    workload = {**graph.workload, **kept}
    return graph.replace(values=tuple(values), model=model, workload=workload)


def _of_optimizer(graph: OpGraph) -> frozenset[int]:
    """Storages of optimizer states and masters, and those that the optimizer makes.

    Among the latter are its fp32 copies of low-precision gradients.
    """
    made = {i for op in graph.ops if op.part == "optimizer" for i in op.outputs}
    return frozenset(
        index
        for index, tensor in enumerate(graph.values)
        if tensor.storage == index and (tensor.role == "optimizer" or index in made)
    )


def _parameter_bytes(graph: OpGraph, values: list[Tensor], declared: bool) -> int:
    """Bytes of all parameters; unread ones change like those that are read."""
    if declared:
        stored: int = graph.model["bytes_stored"]
        return stored
    old = new = 0
    for index in graph.external:
        tensor = graph.values[index]
        if tensor.role == "weights" and tensor.storage == index:
            old += graph.times(tensor) * tensor.nbytes
            new += graph.times(tensor) * values[index].nbytes
    total: int = graph.model.get("bytes_parameters", old)
    return round(total * new / old) if old else total
