"""Which family an op belongs to, from the structure of the graph; no model or module name decides.

attention: everything under the module that calls an attention kernel (or a softmax between two
batched products).  moe: everything under the smallest module that holds both routing and the
experts' products.  Others by their op: norm, embedding, convolution, rnn, loss, optimizer; dense
for matrix products, head for the product that makes the output, elementwise for the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from rooftrace.tracer.graph import Op, OpGraph

FAMILIES = (
    "attention",
    "moe",
    "dense",
    "head",
    "convolution",
    "rnn",
    "norm",
    "embedding",
    "elementwise",
    "loss",
    "optimizer",
    "communication",
)

_ATTENTION = (
    "rooftrace.attention",
    "rooftrace.attention_backward",
    "aten._scaled_dot_product",
    "aten.scaled_dot_product",
    "aten._flash_attention",
    "aten._efficient_attention",
    "rooftrace.flex_attention",
)
_GROUPED = ("aten._grouped_mm", "aten._scaled_grouped_mm")
_ROUTING = ("aten.topk",)
_MATMUL = (
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten.baddbmm",
    "aten._scaled_mm",
    "aten._int_mm",
    "aten.addbmm",
    "aten.addmv",
    "aten.mv",
    "aten.dot",
    "aten._weight_int4pack_mm",
    "aten._weight_int8pack_mm",
    *_GROUPED,
)
_NORMS = (
    "aten.native_layer_norm",
    "aten.native_batch_norm",
    "aten.native_group_norm",
    "aten.cudnn_batch_norm",
    "aten._native_batch_norm",
    "aten.batch_norm",
    "aten._batch_norm",
    "aten._fused_rms_norm",
    "aten.rms_norm",
    "aten.instance_norm",
    "aten._fused_layer_norm",
)
_RNNS = ("rooftrace.rnn", "aten.lstm", "aten.gru", "aten._cudnn_rnn", "aten.mkldnn_rnn")
_LOSSES = (
    "aten.nll_loss",
    "aten._log_softmax",
    "aten.mse_loss",
    "aten.binary_cross_entropy",
    "aten.smooth_l1_loss",
    "aten.huber_loss",
    "aten.kl_div",
    "aten.cross_entropy_loss",
)
_STEPS_AFTER_HEAD = 16
_SOFTMAX = ("aten._softmax", "aten._safe_softmax")


def with_families(graph: OpGraph) -> OpGraph:
    """The same graph with every op's family set."""
    attention = _attention_modules(graph)
    moe = _moe_modules(graph, attention)
    norms = _hand_written_norms(graph)
    heads = _heads(graph)
    named: dict[str, str] = {}
    ops = []
    for op in graph.ops:
        family = _by_op(op, heads)
        if family not in ("optimizer", "communication"):
            inside = named.get(op.module)
            if inside is None:
                inside = named[op.module] = _inside(op.module, attention, moe, norms)
            if inside:
                family = inside
        ops.append(replace(op, family=family) if family != op.family else op)
    return graph.replace(ops=tuple(ops))


def _by_op(op: Op, heads: frozenset[int]) -> str:
    name = op.name
    if op.part == "optimizer" or name.startswith(("aten._fused_adam", "aten._fused_sgd")):
        return "optimizer"
    if name.startswith("_c10d_functional"):
        return "communication"
    if name.startswith(_ATTENTION):
        return "attention"
    if op.id in heads:
        return "head"
    if name in _MATMUL:
        return "dense"
    if "convolution" in name or name.startswith("aten.conv"):
        return "convolution"
    if name.startswith(_RNNS):
        return "rnn"
    if name.startswith(_NORMS):
        return "norm"
    if name.startswith("aten.embedding") or name == "aten._embedding_bag":
        return "embedding"
    if name.startswith(_LOSSES):
        return "loss"
    return "elementwise"


def _inside(
    path: str, attention: frozenset[str], moe: frozenset[str], norms: frozenset[str]
) -> str:
    for prefix in _ancestors(path):
        if prefix in attention:
            return "attention"
        if prefix in moe:
            return "moe"
    return "norm" if path in norms else ""


def _ancestors(path: str) -> Iterable[str]:
    """The path itself and the paths above it, without the root."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _attention_modules(graph: OpGraph) -> frozenset[str]:
    """Modules whose own code calls attention, except those that hold other attention modules."""
    found = {op.module for op in graph.ops if op.module and op.name.startswith(_ATTENTION)}
    batched: dict[str, list[str]] = defaultdict(list)
    for op in graph.ops:
        if op.part == "forward" and op.name in (*_SOFTMAX, "aten.bmm", "aten.baddbmm"):
            batched[op.module].append("softmax" if op.name in _SOFTMAX else "bmm")
    for path, sequence in batched.items():
        if (
            path
            and "softmax" in sequence
            and "bmm" in sequence[: sequence.index("softmax")]
            and "bmm" in sequence[sequence.index("softmax") :]
        ):
            found.add(path)
    return frozenset(_innermost(found))


def _innermost(paths: Iterable[str]) -> set[str]:
    paths = set(paths)
    outer = {p for path in paths for p in _ancestors(path) if p != path}
    return paths - outer


def _moe_modules(graph: OpGraph, attention: frozenset[str]) -> frozenset[str]:
    """Smallest modules that hold a top-k and the expert products it feeds."""
    routing = {
        op.module for op in graph.ops if op.part == "forward" and op.name in _ROUTING and op.module
    }
    products: dict[str, int] = defaultdict(int)
    for op in graph.ops:
        if op.part == "forward" and op.name in _MATMUL:
            for prefix in _ancestors(op.module):
                products[prefix] += 100 if op.name in _GROUPED else 1
    found: set[str] = set()
    for path in routing:
        for prefix in _ancestors(path):
            if prefix in attention:
                break
            if products[prefix] >= 3 and not any(a.startswith(f"{prefix}.") for a in attention):
                found.add(prefix)
                break
    return frozenset(found)


def _hand_written_norms(graph: OpGraph) -> frozenset[str]:
    """Modules whose own ops take a mean (or sum of squares), a reciprocal root and no product."""
    names: Mapping[str, set[str]] = defaultdict(set)
    for op in graph.ops:
        if op.part == "forward" and op.module:
            names[op.module].add(op.name)

    def normalises(ops: set[str]) -> bool:
        root = not ops.isdisjoint({"aten.rsqrt", "aten.sqrt"})
        moment = not ops.isdisjoint({"aten.mean", "aten.var", "aten.var_mean"})
        return root and moment and ops.isdisjoint(_MATMUL)

    return frozenset(path for path, ops in names.items() if normalises(ops))


def _heads(graph: OpGraph) -> frozenset[int]:
    """Matrix products whose result is an output, through views, elementwise ops and a loss.

    Not through a residual connection: what it adds to is no head.
    """
    producers = graph.producers
    heads: set[int] = set()
    for value in graph.outputs:
        if graph.owner(value).role == "kv":
            continue
        index = producers.get(value)
        for _ in range(_STEPS_AFTER_HEAD):
            if index is None:
                break
            op = graph.ops[index]
            if op.name in _MATMUL:
                heads.add(op.id)
                break
            family = _by_op(op, frozenset())
            if op.kind != "view" and family not in ("elementwise", "loss"):
                break
            if family == "elementwise" and _joins(graph, op):
                break
            index = producers.get(op.inputs[0]) if op.inputs else None
    return frozenset(heads)


def _joins(graph: OpGraph, op: Op) -> bool:
    """Whether an op brings several activations together, as a residual connection does."""
    return sum(graph.owner(value).role == "activations" for value in op.inputs) > 1
