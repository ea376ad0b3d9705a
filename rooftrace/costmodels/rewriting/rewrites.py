"""Graph to graph: the same step as another execution model would run it, or in other precisions.

Every pass takes a verified OpGraph and returns one.  `rewrite` applies what an execution model asks
for; `reprice` changes storage precisions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace

from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.rewriting.attention_kernels import flash_from_products
from rooftrace.costmodels.rewriting.attention_products import materialise_attention
from rooftrace.hardware.precisions import PrecisionError, precision
from rooftrace.tracer.arguments import Argument, references, refs
from rooftrace.tracer.asking import check_graph
from rooftrace.tracer.graph import Op, OpGraph, Tensor

CACHE_APPEND = "rooftrace.cache_append.default"


def rewrite(graph: OpGraph, execution: ExecutionModel) -> tuple[OpGraph, tuple[str, ...]]:
    """`graph` as this execution model runs it, and what was changed, one sentence each."""
    detected = execution.fusion == "detected"
    passes = (
        (
            execution.attention == "materialised",
            materialise_attention,
            "attention call",
            "run",
            "as matrix products with the score matrix in HBM",
        ),
        (
            execution.attention == "flash" and detected,
            flash_from_products,
            "hand-written attention",
            "run",
            "as flash attention",
        ),
        (
            execution.kv_append == "in-place",
            append_in_place,
            "cache append",
            "write",
            "the new rows only, into a cache that has room",
        ),
        (
            detected,
            without_dead_ops,
            "op",
            "disappear",
            "because nothing uses the result, as in a compiler",
        ),
    )
    notes = []
    for wanted, change, noun, verb, rest in passes:
        if wanted:
            graph, count = change(graph)
            if count:
                noun, verb = (noun, f"{verb}s") if count == 1 else (f"{noun}s", verb)
                notes.append(f"{count} {noun} {verb} {rest}")
    return graph, tuple(notes)


# -- caches and dead code --------------------------------------------------------------------------


def append_in_place(graph: OpGraph) -> tuple[OpGraph, int]:
    """`cat` of a cache with new rows becomes a write of the new rows into a cache that has room.

    What the `cat` made is then another view of the cache.  A cache that is still empty (prefill)
    is made by its first `cat` as before.
    """
    values, ops = graph.values, []
    moved: dict[int, int] = {}
    grown: set[int] = set()
    count = 0
    for op in graph.ops:
        # By name: of all ops that join tensors, `cat` is the one by which caches grow.
        if op.name == "aten.cat" and op.outputs and values[op.outputs[0]].role == "kv":
            whole, *new = references(op.arguments)
            old = whole.id
            cache = moved.get(values[old].storage, values[old].storage)
            is_cache = values[old].role == "kv" and values[old].elements and not whole.every
            if is_cache and new and old not in grown:
                grown.add(old)
                moved[values[op.outputs[0]].storage] = cache
                count += graph.times(op)
                arguments: dict[str, Argument] = {
                    "cache": whole,
                    "new": tuple(new),
                    "dim": op.arguments.get("dim", 0),
                }
                op = replace(
                    op, target=CACHE_APPEND, arguments=arguments, inputs=tuple(refs(arguments))
                )
        ops.append(op)
    if not moved:
        return graph, 0
    shared = tuple(
        replace(t, storage=moved[t.storage]) if t.storage in moved else t for t in values
    )
    return graph.replace(values=shared, ops=tuple(ops)).verify(), count


def without_dead_ops(graph: OpGraph) -> tuple[OpGraph, int]:
    """Remove ops that neither make an output nor write into something that outlives the step.

    Returns the graph and how many kernels were left out.
    """
    across: set[tuple[int, int]] = set()
    while True:  # an iteration also makes what the next iteration reads
        kept = _needed(graph, across)
        more = {pair for op in kept if op.repeats for pair in _read_across(graph, op)}
        if more <= across:
            break
        across |= more
    if len(kept) == len(graph.ops):
        return graph, 0
    ops = tuple(replace(op, id=index) for index, op in enumerate(kept))
    smaller = graph.replace(ops=ops).verify()
    return smaller, _launched(graph) - _launched(smaller)


def _needed(graph: OpGraph, across: Collection[tuple[int, int]]) -> list[Op]:
    """The ops that make an output, or write what a later op reads.

    across: repeats, and storages that the next iteration reads when one of the repeat has ended.
    """
    storage = [t.storage for t in graph.values]
    live = {storage[i] for i in (*graph.outputs, *graph.external)}
    inside: tuple[int, ...] = ()
    kept = []
    for op in reversed(graph.ops):
        entered = set(op.repeats) - set(inside)
        live.update(value for repeat, value in across if repeat in entered)
        inside = op.repeats
        beside = "writes" in op.facts  # it overwrites an operand, too
        used = beside or not op.outputs or any(storage[i] in live for i in op.outputs)
        if op.kind == "sync" or used:
            kept.append(op)
            live.update(storage[i] for i in op.inputs)
    return kept[::-1]


def _read_across(graph: OpGraph, op: Op) -> Iterator[tuple[int, int]]:
    """Repeats, and storages that an op of one iteration takes from the iteration beside it: of a
    neighbour, or of what all iterations share."""
    values = graph.values
    neighbours = [ref.then for ref in references(op.arguments)]
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
    precision for the weights, in this call or an earlier one, they take what the model's
    quantization_config declares.
    Raises PrecisionError for an unknown name, or a precision that values cannot have.
    """
    check_graph(graph, "reprice")
    if dtype is None and weights_dtype is None and "priced_dtype" not in graph.model:
        weights_dtype = graph.workload.get("declared_weights_dtype")
    if dtype is None and weights_dtype is None and kv_dtype is None:
        return graph
    check_precisions(dtype, weights_dtype, kv_dtype)
    own = str(graph.model.get("priced_dtype") or graph.model.get("dtype", "fp32"))
    by_role = {"weights": weights_dtype or dtype, "kv": kv_dtype or dtype}
    fixed = _optimizers_own(graph)
    values: list[Tensor] = []
    islands: Counter[str] = Counter()
    for index, tensor in enumerate(graph.values):
        wanted = by_role.get(graph.values[tensor.storage].role, dtype)
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
        "bytes_parameters": _parameter_bytes(graph, values),
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


def _parameter_bytes(graph: OpGraph, values: list[Tensor]) -> int:
    """Bytes of all parameters with these values; unread ones change like those that are read."""
    own = new = 0
    for index in graph.external:
        if graph.values[index].role == "weights" and graph.values[index].storage == index:
            copies = graph.times(graph.values[index])
            own += copies * graph.values[index].nbytes
            new += copies * values[index].nbytes
    total = int(graph.model.get("bytes_parameters", own))
    return round(total * new / own) if own else total
