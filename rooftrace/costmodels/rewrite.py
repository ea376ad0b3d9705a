"""Graph to graph: the same step as another execution model would run it, or in other precisions.

Every pass takes a verified OpGraph and returns one.  `rewrite` applies what an execution model asks
for; `reprice` changes storage precisions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.hardware.precision import precision
from rooftrace.tracer.graph import Argument, Op, OpGraph, Ref, Tensor, refs

ATTENTION = "rooftrace.attention.default"
ATTENTION_BACKWARD = "rooftrace.attention_backward.default"
CACHE_APPEND = "rooftrace.cache_append.default"


def rewrite(graph: OpGraph, execution: ExecutionModel) -> tuple[OpGraph, tuple[str, ...]]:
    """`graph` as this execution model runs it, and what was changed, one sentence each."""
    notes = []
    if execution.attention == "materialised":
        graph, count = materialise_attention(graph)
        if count:
            notes.append(f"{count} attention calls run as matrix products with their score matrix in HBM")
    elif execution.fusion == "detected":
        graph, count = flash_from_products(graph)
        if count:
            notes.append(f"{count} hand-written attentions (product, softmax, product) run as flash attention")
    if execution.kv_append == "in-place":
        graph, count = append_in_place(graph)
        if count:
            notes.append(f"{count} cache appends are priced in place: only the new rows are written")
    if execution.fusion == "detected":
        graph, count = without_dead_ops(graph)
        if count:
            notes.append(f"{count} ops whose result is never used are left out, as a compiler would")
    return graph, tuple(notes)


# -- attention --------------------------------------------------------------------------------------

class _Editor:
    """A graph being rebuilt: new values at the end, ops in a new list, renumbered at the end."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.values = list(graph.values)
        self.ops: list[Op] = []

    def value(self, shape: tuple[int, ...], dtype: str, role: str, storage: int | None = None) -> int:
        """A new contiguous value; with `storage`, another view of those bytes."""
        index = len(self.values)
        stride, step = [], 1
        for size in reversed(shape):
            stride.append(step)
            step *= max(size, 1)
        self.values.append(Tensor(shape, dtype, tuple(reversed(stride)), role,
                                  index if storage is None else storage))
        return index

    def emit(self, like: Op, target: str, arguments: Mapping[str, Argument], outputs: tuple[int, ...],
             facts: Mapping[str, Any] | None = None) -> None:
        """An op in the place of `like`: same module, part and family."""
        self.ops.append(replace(like, target=target, arguments=dict(arguments), inputs=tuple(refs(dict(arguments))),
                                outputs=outputs, facts=dict(facts or {}), flops_torch=None))

    def done(self) -> OpGraph:
        """The new graph, verified."""
        ops = tuple(replace(op, id=index) if op.id != index else op for index, op in enumerate(self.ops))
        return self.graph.replace(values=tuple(self.values), ops=ops).verify()


def materialise_attention(graph: OpGraph) -> tuple[OpGraph, int]:
    """Every attention op as scores = q k^T, scale, mask, softmax, out = p v, each a kernel of its own.

    Backward uses the probabilities saved by forward.  Returns the graph and how many were replaced.
    """
    edit = _Editor(graph)
    saved: dict[int, int] = {}
    count = 0
    for op in graph.ops:
        if op.target == ATTENTION:
            _materialise_forward(edit, op, saved)
            count += 1
        elif op.target == ATTENTION_BACKWARD:
            _materialise_backward(edit, op, saved)
        else:
            edit.ops.append(op)
    return (edit.done(), count) if count else (graph, 0)


def _attention_sizes(edit: _Editor, op: Op) -> tuple[int, int, int, int, int, int]:
    """(batch x query heads, batch x key heads, S, L, E, Ev) of an attention op."""
    query = edit.values[_ref(op, "query")].shape
    key = edit.values[_ref(op, "key")].shape
    value = edit.values[_ref(op, "value")].shape
    heads = _product(query[:-2])
    return heads, _product(key[:-2]), query[-2], key[-2], query[-1], value[-1]


def _pair_facts(op: Op, s: int, length: int) -> dict[str, int]:
    """How many (query, key) pairs a kernel that knows the mask would compute, of how many."""
    visible = op.facts.get("visible_pairs")
    if visible is None:
        causal = bool(op.arguments.get("is_causal", False))
        visible = sum(min(i + 1, length) for i in range(s)) if causal else s * length
    return {"useful_pairs": int(visible), "all_pairs": s * length}


def _materialise_forward(edit: _Editor, op: Op, saved: dict[int, int]) -> None:
    heads, key_heads, s, length, e, ev = _attention_sizes(edit, op)
    query, key, value = (_ref(op, n) for n in ("query", "key", "value"))
    dtype = edit.values[query].dtype
    facts = _pair_facts(op, s, length)
    q3 = edit.value((heads, s, e), dtype, "activations", edit.values[query].storage)
    k3, v3 = (_repeated(edit, op, t, heads, key_heads, width)
              for t, width in ((key, (length, e)), (value, (length, ev))))
    scores = edit.value((heads, s, length), dtype, "temporary")
    edit.emit(op, "aten.bmm.default", {"self": Ref(q3), "mat2": Ref(_transposed(edit, k3))}, (scores,), facts)
    scaled = edit.value((heads, s, length), dtype, "temporary")
    edit.emit(op, "aten.mul.Tensor", {"self": Ref(scores), "other": op.arguments.get("scale", 1.0)}, (scaled,))
    mask = op.arguments.get("mask")
    if isinstance(mask, Ref) or op.arguments.get("is_causal", False):
        masked = edit.value((heads, s, length), dtype, "temporary")
        if not isinstance(mask, Ref):
            mask = Ref(edit.value((s, length), "bool", "constants"))
        if edit.values[mask.id].dtype == "bool":
            edit.emit(op, "aten.masked_fill.Scalar",
                      {"self": Ref(scaled), "mask": mask, "value": float("-inf")}, (masked,))
        else:
            edit.emit(op, "aten.add.Tensor", {"self": Ref(scaled), "other": mask}, (masked,))
        scaled = masked
    probabilities = edit.value((heads, s, length), dtype, "temporary")
    edit.emit(op, "aten._softmax.default", {"self": Ref(scaled), "dim": -1, "half_to_float": False},
              (probabilities,))
    edit.emit(op, "aten.bmm.default", {"self": Ref(probabilities), "mat2": Ref(v3)}, (op.outputs[0],), facts)
    saved[op.outputs[0]] = probabilities


def _materialise_backward(edit: _Editor, op: Op, saved: Mapping[int, int]) -> None:
    heads, key_heads, s, length, e, ev = _attention_sizes(edit, op)
    query, key, value, grad = (_ref(op, n) for n in ("query", "key", "value", "grad_out"))
    dtype = edit.values[query].dtype
    facts = _pair_facts(op, s, length)
    probabilities = saved.get(_ref(op, "out"))
    if probabilities is None:  # forward ran elsewhere: its probabilities come from outside
        probabilities = edit.value((heads, s, length), dtype, "temporary")
    storage = {n: edit.values[n].storage for n in (query, key, value, grad)}
    go = edit.value((heads, s, ev), dtype, "temporary", storage[grad])
    q3 = edit.value((heads, s, e), dtype, "activations", storage[query])
    k3, v3 = (_repeated(edit, op, t, heads, key_heads, width)
              for t, width in ((key, (length, e)), (value, (length, ev))))
    grad_q, grad_k, grad_v = op.outputs[:3]

    def product(a: int, b: int, out: int) -> None:
        edit.emit(op, "aten.bmm.default", {"self": Ref(a), "mat2": Ref(b)}, (out,), facts)

    def summed(out: int, a: int, b: int, width: int) -> None:
        """A product that makes the gradient of keys or values; shared heads are added up."""
        if heads == key_heads:
            product(a, b, out)
            return
        wide = edit.value((heads, length, width), dtype, "temporary")
        product(a, b, wide)
        grouped = edit.value((key_heads, heads // key_heads, length, width), dtype, "temporary",
                             edit.values[wide].storage)
        edit.emit(op, "aten.sum.dim_IntList", {"self": Ref(grouped), "dim": (1,)}, (out,))
    summed(grad_v, _transposed(edit, probabilities), go, ev)
    grad_p = edit.value((heads, s, length), dtype, "temporary")
    product(go, _transposed(edit, v3), grad_p)
    grad_s = edit.value((heads, s, length), dtype, "temporary")
    edit.emit(op, "aten._softmax_backward_data.default",
              {"grad_output": Ref(grad_p), "output": Ref(probabilities), "dim": -1, "input_dtype": f"dtype:{dtype}"},
              (grad_s,))
    scaled = edit.value((heads, s, length), dtype, "temporary")
    edit.emit(op, "aten.mul.Tensor", {"self": Ref(grad_s), "other": op.arguments.get("scale", 1.0)}, (scaled,))
    product(scaled, k3, grad_q)
    summed(grad_k, _transposed(edit, scaled), q3, e)
    if len(op.outputs) > 3 and edit.values[op.outputs[3]].elements:
        edit.emit(op, "aten.sum.dim_IntList", {"self": Ref(grad_s), "dim": (0,)}, (op.outputs[3],))


def _repeated(edit: _Editor, op: Op, tensor: int, heads: int, key_heads: int, width: tuple[int, int]) -> int:
    """[heads, L, E] of a key or value tensor; shared heads are copied, as unfused code does."""
    source = edit.values[tensor]
    if heads == key_heads:
        return edit.value((heads, *width), source.dtype, source.role, source.storage)
    narrow = edit.value((key_heads, *width), source.dtype, source.role, source.storage)
    wide = edit.value((heads, *width), source.dtype, "temporary")
    edit.emit(op, "aten.repeat_interleave.self_int",
              {"self": Ref(narrow), "repeats": heads // key_heads, "dim": 0}, (wide,))
    return wide


def _transposed(edit: _Editor, index: int) -> int:
    """A [H, b, a] view of an [H, a, b] value."""
    source = edit.values[index]
    heads, a, b = source.shape
    edit.values.append(Tensor((heads, b, a), source.dtype, (source.stride[0], source.stride[2], source.stride[1]),
                              source.role, source.storage))
    return len(edit.values) - 1


def flash_from_products(graph: OpGraph) -> tuple[OpGraph, int]:
    """Hand-written attention as one op: bmm, then scale / mask / cast / dropout, softmax, cast, bmm.

    Only where nothing else reads what lies between, so that the score matrix can stay on the chip;
    in training backward reads the probabilities, and the attention stays as it was written.
    """
    users: dict[int, list[int]] = {}
    for op in graph.ops:
        for index in op.inputs:
            users.setdefault(graph.values[index].storage, []).append(op.id)
    results = {graph.values[i].storage for i in graph.outputs}
    replaced: dict[int, Op] = {}
    dropped: set[int] = set()
    edit = _Editor(graph)
    for op in graph.ops:
        if op.name != "aten.bmm" or op.part != "forward" or op.id in dropped:
            continue
        found = _products_around_softmax(graph, op, users, results)
        if found is None:
            continue
        inner, last, mask = found
        query, keys = _ref(op, "self"), _ref(op, "mat2")
        heads, s, e = graph.values[query].shape
        length = graph.values[keys].shape[-1]
        source = graph.values[keys]
        key = edit.value((heads, length, e), source.dtype, source.role, source.storage)
        logsumexp = edit.value((heads, s), "fp32", "activations")
        arguments: dict[str, Argument] = {
            "query": Ref(query), "key": Ref(key), "value": Ref(_ref(last, "mat2")),
            **({"mask": Ref(mask)} if mask is not None else {}),
            "dropout_p": 0.0, "is_causal": False, "scale": 1.0}
        replaced[last.id] = replace(last, target=ATTENTION, arguments=arguments, inputs=tuple(refs(arguments)),
                                    outputs=(last.outputs[0], logsumexp), flops_torch=None)
        dropped.update(inner)
    if not replaced:
        return graph, 0
    edit.ops = [replaced.get(op.id, op) for op in graph.ops if op.id not in dropped]
    return edit.done(), len(replaced)


_BETWEEN = frozenset({"aten.mul", "aten.div", "aten.add", "aten.masked_fill", "aten.where", "aten._to_copy",
                      "aten.clone", "aten.native_dropout", "aten.sub", "aten.mul_", "aten.div_", "aten.add_",
                      "aten.masked_fill_"})


def _products_around_softmax(graph: OpGraph, first: Op, users: Mapping[int, list[int]],
                             results: set[int]) -> tuple[set[int], Op, int | None] | None:
    """(ops to drop, the second product, its mask) of an attention that starts at `first`."""
    if any(len(graph.values[_ref(first, n)].shape) != 3 for n in ("self", "mat2")):
        return None
    inner = {first.id}
    current, softmax, mask = first, False, None
    size = graph.values[first.outputs[0]].elements
    for _ in range(12):
        storage = graph.values[current.outputs[0]].storage
        if storage in results:
            return None
        following = [u for u in users.get(storage, ()) if u not in inner]
        views = [u for u in following if graph.ops[u].kind == "view"]
        inner.update(views)
        kernels = [u for u in following if u not in views]
        if len(kernels) != 1:
            return None
        op = graph.ops[kernels[0]]
        if op.name == "aten.bmm":
            probabilities = _ref(op, "self")
            fits = graph.values[probabilities].storage == storage
            return (inner, op, mask) if softmax and fits else None
        if op.name in ("aten._softmax", "aten._safe_softmax"):
            softmax = True
        elif op.name not in _BETWEEN:
            return None
        elif op.name.startswith(("aten.add", "aten.masked_fill", "aten.where")):
            others = [i for i in op.inputs if graph.values[i].storage != storage]
            mask = others[0] if others else mask
        if graph.values[op.outputs[0]].elements != size:
            return None
        inner.add(op.id)
        current = op
    return None


# -- caches and dead code ---------------------------------------------------------------------------

def append_in_place(graph: OpGraph) -> tuple[OpGraph, int]:
    """`cat` of a cache with new rows becomes a write of the new rows into a cache that has room."""
    ops, count = [], 0
    for op in graph.ops:
        if op.name == "aten.cat" and op.outputs and graph.values[op.outputs[0]].role == "kv":
            old, *new = op.inputs
            if graph.values[old].role == "kv" and graph.values[old].elements and new:
                arguments: dict[str, Argument] = {
                    "cache": Ref(old), "new": tuple(Ref(i) for i in new), "dim": op.arguments.get("dim", 0)}
                op = replace(op, target=CACHE_APPEND, arguments=arguments, inputs=tuple(refs(arguments)))
                count += 1
        ops.append(op)
    return (graph.replace(ops=tuple(ops)).verify(), count) if count else (graph, 0)


def without_dead_ops(graph: OpGraph) -> tuple[OpGraph, int]:
    """Without ops that neither make an output nor write into something that lives on."""
    storage = [t.storage for t in graph.values]
    live = {storage[i] for i in graph.outputs} | {storage[i] for i in graph.external}
    kept = []
    for op in reversed(graph.ops):
        writes = {storage[i] for i in op.outputs}
        if op.kind == "sync" or not op.outputs or writes & live:
            kept.append(op)
            live.update(storage[i] for i in op.inputs)
    if len(kept) == len(graph.ops):
        return graph, 0
    ops = tuple(replace(op, id=index) for index, op in enumerate(reversed(kept)))
    dropped = sum(1 for op in graph.ops if op.kind == "kernel") - sum(1 for op in ops if op.kind == "kernel")
    return graph.replace(ops=ops).verify(), dropped


# -- precisions -------------------------------------------------------------------------------------

def check_precisions(*names: str | None) -> None:
    """Raise PrecisionError for a name that is not a storage precision of floats or low-bit integers."""
    for name in names:
        if name is not None:
            precision(name)


def reprice(graph: OpGraph, dtype: str | None = None, weights_dtype: str | None = None,
            kv_dtype: str | None = None) -> OpGraph:
    """The same ops with other storage precisions.

    dtype: for every float in the model's own precision (`graph.model["dtype"]`); explicit islands in
    another precision (fp32 norms, routers, logits), integers and everything the optimizer keeps stay
    and are listed.  weights_dtype, kv_dtype: for tensors of that role, in the model's precision.
    Raises PrecisionError for a name that does not exist.
    """
    if dtype is None and weights_dtype is None and kv_dtype is None:
        return graph
    check_precisions(dtype, weights_dtype, kv_dtype)
    own = str(graph.model.get("dtype", "fp32"))
    states = {i for op in graph.ops if op.part == "optimizer" for i in op.outputs}
    by_role = {"weights": weights_dtype, "kv": kv_dtype}
    values, islands = [], Counter[str]()
    for index, tensor in enumerate(graph.values):
        owner = graph.values[tensor.storage]
        fixed = owner.role == "optimizer" or (index in states and owner.role not in ("weights", "gradients"))
        wanted = by_role.get(owner.role) or dtype
        if tensor.dtype == own and wanted is not None and not fixed:
            values.append(replace(tensor, dtype=wanted))
            continue
        if tensor.dtype != own and precision(tensor.dtype).kind == "float" and tensor.storage == index \
                and not fixed:
            islands[tensor.dtype] += 1
        values.append(tensor)
    model = {**graph.model, "priced_dtype": dtype or own}
    if dtype is not None:
        model["bytes_parameters"] = _parameter_bytes(graph, values)
        model["islands"] = dict(islands)
    workload = {**graph.workload, "dtype": dtype, "weights_dtype": weights_dtype, "kv_dtype": kv_dtype}
    return graph.replace(values=tuple(values), model=model, workload=workload)


def _parameter_bytes(graph: OpGraph, values: list[Tensor]) -> int:
    """Bytes of the parameters after re-pricing (those that this step reads; the rest at the same rate)."""
    own, new = 0, 0
    for index in graph.external:
        if graph.values[index].role == "weights" and graph.values[index].storage == index:
            own += graph.values[index].nbytes
            new += values[index].nbytes
    total = int(graph.model.get("bytes_parameters", own))
    return round(total * new / own) if own else total


def _ref(op: Op, name: str) -> int:
    item = op.arguments[name]
    assert isinstance(item, Ref)
    return item.id


def _product(sizes: tuple[int, ...]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result
