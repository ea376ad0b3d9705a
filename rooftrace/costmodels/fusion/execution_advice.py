"""The usual execution of a step, notes from the structure of its graph, and rule coverage."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rooftrace._extensions import owner
from rooftrace._plain import Share
from rooftrace._reading import beginning
from rooftrace.costmodels.fusion.executions import ExecutionModel, execution_model
from rooftrace.costmodels.fusion.partition import FusionGroup
from rooftrace.costmodels.ops import MATRIX, Cost, find_rule, unknown_bytes, users_rules
from rooftrace.costmodels.ops.cost import UNFUSED
from rooftrace.errors import RequestError, hint
from rooftrace.graph import Op, OpGraph, looks_saved, marks, pattern_of
from rooftrace.hardware.units import format_flops, plural
from rooftrace.tracer import Job
from rooftrace.tracer.recording import registered_ops

_HEAD = 20_000
"""Bytes at the beginning of a saved graph that hold its provenance."""


def usual_execution(*sources: Any) -> str:
    """The default execution: of a script's steps as it compiles them, of others efficient.

    sources: as of `estimate`; None is none.  Raises RequestError for sources of both kinds.
    """
    of_scripts = [_is_of_script(source) for source in sources if source is not None]
    if len(set(of_scripts)) > 1:
        raise RequestError(
            "steps of scripts are priced as mixed and others as efficient, and here are both: say "
            "one for all as execution= (--execution)"
        )
    return "mixed" if any(of_scripts) else "efficient"


def _is_of_script(source: Any) -> bool:
    """Whether a source is a script, or a record of one."""
    if isinstance(source, OpGraph):
        return bool(source.provenance.get("script"))
    if isinstance(source, Mapping):
        return any(map(_is_of_script, source.values()))
    job = source if isinstance(source, Job) else Job(source=source)
    if job.source is not source:
        return _is_of_script(job.source)
    if job.is_named and looks_saved(job.name):
        return b'"script":true' in beginning(job.name, _HEAD)
    return job.is_script


def as_written(graph: OpGraph, model: ExecutionModel) -> tuple[OpGraph, ExecutionModel]:
    """A graph as an execution model runs it, and that model.

    A mixed model becomes eager where the script compiles nothing of the step, and compiled where
    it compiles all; else breaks stand where compiled code begins and ends.
    """
    if model.dispatch != "mixed":
        return graph, model
    inside = {marks.COMPILED in op.facts for op in graph.ops if op.kind == "kernel"}
    if True in inside:
        graph = marks.without_variables(graph)
    if len(inside) < 2:
        preset = execution_model("compiled" if inside == {True} else "eager")
        same = {name: getattr(preset, name) for name in ("name", "fusion", "dispatch", "kv_append")}
        return graph, replace(model, **same)
    return marks.with_breaks(graph, marks.compiled_cuts(graph.ops)), model


# -- advice ----------------------------------------------------------------------------------------

PRODUCT = ("matmul",)  # not a convolution over a window of the state


def given_formulas(graph: OpGraph) -> tuple[str, ...]:
    """A sentence on ops whose FLOPs come from a formula registered with torch; none without any."""
    calls: Counter[str] = Counter()
    for op in graph.ops:
        rule = find_rule(op.target)
        if "flops_given" in op.facts and not (rule and rule.is_own):
            calls[op.name] += graph.times(op)
    named = ", ".join(f"{name} x{count}" for name, count in calls.items())
    return (f"FLOPs by a formula registered with torch: {named}",) if named else ()


def attention_apart(graph: OpGraph) -> tuple[str, ...]:
    """A sentence for each reason for which CUDA has no kernel for an attention."""
    calls: Counter[str] = Counter()
    for op in graph.ops:
        if UNFUSED in op.facts:
            calls[str(op.facts[UNFUSED])] += graph.times(op)
    return tuple(
        f"{plural(count, 'attention')} without a kernel of {'its' if count == 1 else 'their'} own "
        f"on CUDA, as {why}: products and a softmax, with the scores in HBM"
        for why, count in calls.items()
    )


def rules_of_no_op(graph: OpGraph) -> tuple[str, ...]:
    """A sentence for each rule of a user's for an op that torch does not have.

    None where torch is not loaded, or no op of the library is.  Rules of a package are left out,
    as it may be for several releases of a library.
    """
    there = {name for op in graph.ops for name in (op.name, op.target)}
    sentences = []
    for rule in users_rules():
        if rule.name in there:
            continue
        library = rule.name.partition(".")[0]
        names = registered_ops(library)
        if names and rule.name not in names:
            sentences.append(
                f'the rule "{rule.name}" ({owner(rule.price)}) prices nothing: {library} is loaded '
                f"and has no op of this name{hint(rule.name, names)}"
            )
    return tuple(sentences)


def joined_by_users(groups: Sequence[FusionGroup]) -> tuple[str, ...]:
    """Sentences about kernels that joins of users made, and about those that they fit and cannot
    join; none where there are none."""
    kernels: Counter[str] = Counter()
    apart: dict[str, Counter[str]] = defaultdict(Counter)
    for group in groups:
        for join in group.own_joins:
            kernels[join] += group.times
        for other in group.apart:
            if other.is_first:
                apart[other.join][other.reason] += group.times
    named = ", ".join(f"{name} x{count}" for name, count in kernels.items())
    joined = (
        (f"kernels joined as registered with rooftrace.extend.fusion: {named}",) if named else ()
    )
    return (*joined, *(_kept_apart(join, apart[join], kernels[join]) for join in apart))


def _kept_apart(join: str, reasons: Counter[str], joined: int) -> str:
    counted = len(reasons) > 1
    why = ", ".join(f"{reason} ({n})" if counted else reason for reason, n in reasons.items())
    where = plural(reasons.total(), "more place" if joined else "place")
    return f'the join "{join}" fits in {where} where the kernels stay apart: {why}'


def unknown_groups(graph: OpGraph, op_costs: Sequence[Cost]) -> tuple[str, ...]:
    """A sentence about collectives whose group has an unknown size, if any."""
    calls: Counter[str] = Counter()
    for op, cost in zip(graph.ops, op_costs, strict=True):
        size = op.arguments.get("group_size", op.facts.get("group_size"))
        rule = find_rule(op.target)
        collective = rule is not None and rule.family == "communication"
        if collective and size is None and cost.bytes("link"):
            calls[op.name] += graph.times(op)
    named = ", ".join(f"{name} x{count}" for name, count in calls.items())
    if not named:
        return ()
    return (f"collectives of a group of unknown size, counted as of a large one: {named}",)


def cache_products(graph: OpGraph, op_costs: Sequence[Cost]) -> tuple[str, ...]:
    """A sentence about matrix products of the full cache with weights, if any.

    In every step they repeat the same product for every cached token.  As the product is linear,
    the weights can be multiplied into the query instead.
    """
    cached = _made_of(graph, "kv")
    if not cached:
        return ()
    weights = _made_of(graph, "weights", alone=True)
    products = [
        op
        for op in graph.ops
        if op.part == "forward"
        and op_costs[op.id].flops(PRODUCT)
        and _multiplies(graph, op, cached, weights)
    ]
    if not products:
        return ()
    count = sum(graph.times(op) for op in products)
    again = sum(graph.times(op) * op_costs[op.id].flops(PRODUCT) for op in products)
    total = sum(
        graph.times(op) * cost.flops(MATRIX) for op, cost in zip(graph.ops, op_costs, strict=True)
    )
    modules = ", ".join(dict.fromkeys(pattern_of(op.module) or "the model" for op in products))
    verb = "product multiplies" if count == 1 else "products multiply"
    return (
        f"{count} matrix {verb} the whole cache with weights ({modules}): "
        f"{format_flops(again)} of {format_flops(total)}; absorbing those weights into the "
        "query would avoid that",
    )


def _multiplies(
    graph: OpGraph, op: Op, cached: Mapping[int, int], weights: Mapping[int, int]
) -> bool:
    """Whether the op multiplies a matrix of weights with as many elements as the cache has, or
    more."""
    by_weights = any(i in weights and len(graph.values[i].shape) > 1 for i in op.inputs)
    return by_weights and any(
        i in cached and graph.values[i].elements >= cached[i] for i in op.inputs
    )


def _made_of(graph: OpGraph, role: str, alone: bool = False) -> dict[int, int]:
    """Values of this role from outside, and results of views and pointwise ops on them.

    Each value is mapped to the number of elements of the value from outside.  alone: leaves out
    results of other values too.
    """
    values = graph.values
    derived = {
        i: values[i].elements
        for i in graph.external
        if values[i].role == role and values[i].elements
    }
    for op in graph.ops:
        sources = [derived[i] for i in op.inputs if i in derived]
        if not sources or (alone and len(sources) < len(op.inputs)):
            continue
        # Any op that appends to a cache makes a cache.
        grows = any(values[i].role == "kv" for i in op.outputs)
        if op.kind == "view" or grows or _is_pointwise(op):
            derived.update(dict.fromkeys(op.outputs, max(sources)))
    return derived


def _is_pointwise(op: Op) -> bool:
    rule = find_rule(op.target)
    return rule is not None and rule.fusion == "pointwise"


# -- coverage --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsupported:
    """An op without a rule: no FLOP of it is counted."""

    target: str
    count: int
    bytes: int  # the bytes in the totals, see `price.without_rule`
    shapes: str  # "bf16[8, 2048], int64[8]"
    modules: tuple[str, ...]
    bytes_least: int = 0  # bounds, if it touches no byte twice: see `price.unknown_bytes`
    bytes_most: int | None = None

    @property
    def most(self) -> int:
        """The upper bound; `bytes` without one."""
        return self.bytes if self.bytes_most is None else self.bytes_most

    @property
    def stub(self) -> str:
        """A rule to paste and fill in."""
        name = self.target.rsplit(".", 1)[0]
        function = name.replace(".", "_").strip("_")
        return (
            f'@rooftrace.extend.rule("{name}")\ndef {function}(op):\n'
            f"    return rooftrace.extend.Cost.of(vector=...) + op.streamed()"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """The part of a total that rests on explicit rules."""

    ops: int
    ops_with_rule: int
    bytes: int
    bytes_with_rule: int
    unsupported: tuple[Unsupported, ...]

    @property
    def bytes_with_rule_share(self) -> Share:
        """Share of the priced bytes that a rule accounts for (1 when nothing moves)."""
        return self.bytes_with_rule / self.bytes if self.bytes else 1.0


def coverage_of(graph: OpGraph, costs: Sequence[Cost], has_rule: Sequence[bool]) -> Coverage:
    """The coverage of a graph.  costs, has_rule: of each op."""
    unruled: dict[str, list[tuple[Op, int]]] = defaultdict(list)  # with the bytes, by target
    ops = total = 0
    for op, cost, ruled in zip(graph.ops, costs, has_rule, strict=True):
        if op.kind != "kernel":
            continue
        size = graph.times(op) * (cost.bytes() + cost.bytes("link"))
        ops += graph.times(op)
        total += size
        if not ruled:
            unruled[op.target].append((op, size))
    unsupported = [_unsupported(graph, members) for members in unruled.values()]
    return Coverage(
        ops=ops,
        ops_with_rule=ops - sum(each.count for each in unsupported),
        bytes=total,
        bytes_with_rule=total - sum(each.bytes for each in unsupported),
        unsupported=tuple(sorted(unsupported, key=lambda each: (-each.bytes, each.target))),
    )


def _unsupported(graph: OpGraph, members: Sequence[tuple[Op, int]]) -> Unsupported:
    """The ops of one target, given with their bytes."""
    first = members[0][0]
    bounds = [(graph.times(op), *unknown_bytes(graph, op)) for op, _ in members]
    return Unsupported(
        target=first.target,
        count=sum(times for times, _, _ in bounds),
        bytes=sum(size for _, size in members),
        shapes=_shapes(graph, first.inputs[:3]),
        modules=tuple(dict.fromkeys(pattern_of(op.module) for op, _ in members)),
        bytes_least=sum(times * least for times, least, _ in bounds),
        bytes_most=sum(times * most for times, _, most in bounds),
    )


def _shapes(graph: OpGraph, inputs: Sequence[int]) -> str:
    """The types and shapes of values as text: "bf16[8, 2048], int64[8]"."""
    tensors = (graph.values[i] for i in inputs)
    return ", ".join(f"{t.dtype}[{', '.join(map(str, t.shape))}]" for t in tensors)
