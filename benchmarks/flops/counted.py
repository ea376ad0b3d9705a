"""One step of a module counted twice: by our rules, and by torch's FlopCounterMode as it runs.

The second run has no repeats, no rolled loops and no op kept whole: attention and recurrent
networks are taken apart into the products that FlopCounterMode has a formula for (flex_attention
has one since torch 2.13; before, it is among what torch does not count).  Both run under the same
policy for unknown values, so both take the same branches.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from msgspec.structs import replace
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from rooftrace.costmodels.estimates.counters import AS_CALLED, unread_gradients
from rooftrace.costmodels.fusion.plans import plan
from rooftrace.costmodels.ops.cost import MATRIX
from rooftrace.graph.graph import OpGraph
from rooftrace.graph.records import Op
from rooftrace.tracer.inputs.calls import Inputs
from rooftrace.tracer.phases import attempts, running as phases_running
from rooftrace.tracer.recording import recorder, running
from rooftrace.tracer.request import Options

Counts = dict[str, Any]
"""What `compared` says of one phase; all FLOPs are of matrix products and convolutions.

ops, ours: kernels, and their FLOP.  torch: what FlopCounterMode counted in a run of its own, or
None with `error`.  differs: ops by target whose formula in torch's registry says something else,
as [ours, torch's].  uncounted: FLOP of ops without such a formula.  unwanted: what one of the two
counts and the other, rightly, does not: see `unread_gradients`, and the recomputation inside of
flash kernels.  rest: what is left of the difference of the totals after these; the claim is 0.
zero: ops on floats priced at no work.  missing: bytes of ops without a rule; bytes: of all.
"""
FLEX_COUNTS = flex_attention in flop_registry
"""Whether torch has formulas for flex_attention."""
WHOLE = ("rooftrace.attention", "rooftrace.rnn", *["rooftrace.flex_attention"] * FLEX_COUNTS)
"""Ops of ours that FlopCounterMode sees taken apart."""


def compared(module: Any, inputs: Inputs, phase: str) -> Counts:
    """Trace one phase and price it; run it again under FlopCounterMode; say where they differ."""
    options = Options(optimizer="none")
    graph = phases_running.trace_phases(module, inputs, (phase,), options)[phase]
    found = ours(graph)
    try:
        found["torch"] = counted_by_torch(module, inputs, phase)
    except Exception as error:  # whatever its hooks and decompositions run into
        first = str(error).strip().partition("\n")[0]
        return {**found, "torch": None, "rest": None, "error": f"{type(error).__name__}: {first}"}
    explained = (
        sum(mine - theirs for mine, theirs in found["differs"].values())
        + sum(found["uncounted"].values())
        + found["unwanted"]
    )
    return {**found, "rest": found["ours"] - explained - found["torch"]}


def ours(graph: OpGraph) -> Counts:
    """The part of `Counts` that needs no second run.

    What a checkpoint runs again counts like the rest: FlopCounterMode cannot tell it apart.
    """
    ops = (replace(op, part="forward") if op.part == "recompute" else op for op in graph.ops)
    planned = plan(graph.replace(ops=tuple(ops)), AS_CALLED)
    differs: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    uncounted: Counter[str] = Counter()
    zero: Counter[str] = Counter()
    missing = {one.target: one.bytes for one in planned.coverage.unsupported}
    unwanted = 0
    for op, cost in zip(planned.graph.ops, planned.op_costs, strict=True):
        times, name = planned.graph.times(op), op.target.rpartition(".")[0]
        flops, again = cost.flops(MATRIX), cost.flops(MATRIX, ("recompute",))
        flex = FLEX_COUNTS and name == "rooftrace.flex_attention_backward"
        if op.flops_torch is not None or flex:
            # torch's formulas count what a flash kernel computes a second time; we keep it apart.
            unwanted -= times * again
            flops += again
        if op.flops_torch is not None and flops != op.flops_torch:
            differs[name][0] += times * flops
            differs[name][1] += times * op.flops_torch
        if op.flops_torch is None and flops and not name.startswith(WHOLE):
            uncounted[name] += times * flops
        if name == "rooftrace.rnn_backward":
            unwanted += times * unread_gradients(planned.graph, op)
        if op.kind == "kernel" and not cost.work and op.target not in missing:
            zero[name] += times if on_floats(planned.graph, op) else 0
    coverage = planned.coverage
    return {
        "ops": coverage.ops,
        "ours": planned.total.flops(MATRIX),
        "differs": dict(differs),
        "uncounted": dict(uncounted),
        "unwanted": unwanted,
        "zero": {name: count for name, count in zero.items() if count},
        "missing": missing,
        "bytes": coverage.bytes,
        "bytes_with_rule": coverage.bytes_with_rule,
    }


def on_floats(graph: OpGraph, op: Op) -> bool:
    """Whether the op touches a floating or complex tensor at all."""
    kinds = (graph.values[i].dtype for i in (*op.inputs, *op.outputs))
    return any(kind.startswith(("fp", "bf", "complex")) for kind in kinds)


def counted_by_torch(module: Any, inputs: Inputs, phase: str) -> int:
    """FLOP that FlopCounterMode counts in one step of `module` on meta tensors."""
    counter = FlopCounterMode(display=False, custom_mapping=flex_flops())
    counter.mod_tracker = _OneTotal()
    with run_under(counter):
        phases_running.trace_phases(
            module, inputs, (phase,), Options(optimizer="none", repeats=False)
        )
    return counter.get_total_flops()


def flex_flops() -> dict[Any, Any]:
    """torch's own formulas for flex_attention, for the op that stands for it on meta tensors."""
    if not FLEX_COUNTS:
        return {}

    def forward(query: Any, key: Any, value: Any, *args: Any, out_val: Any = None) -> int:
        return int(flop_registry[flex_attention](query, key, value, out_val=out_val))

    def backward(
        grad: Any, query: Any, key: Any, value: Any, out: Any, *args: Any, **_: Any
    ) -> int:
        return int(flop_registry[flex_attention_backward](query, key, value, out, None, grad))

    forward._get_raw = backward._get_raw = True
    ops: Any = torch.ops.rooftrace
    return {ops.flex_attention: forward, ops.flex_attention_backward: backward}


class _OneTotal(contextlib.nullcontext[None]):
    """Instead of FlopCounterMode's module tree, whose hooks fail on some outputs."""

    parents = frozenset({"Global"})


@contextlib.contextmanager
def run_under(counter: FlopCounterMode) -> Iterator[None]:
    """Steps inside run op by op under `counter`, as PyTorch takes them apart; nothing is lowered.

    Our recorder stays below: it knows the values that data-dependent code asks for.
    """

    class Counted(recorder.Recorder):
        def __init__(self, values: Any = None, record: bool = True, **options: Any) -> None:
            super().__init__(values, record, roll_loops=False, repeat_calls=False)

        def __enter__(self) -> Any:
            super().__enter__()
            counter.__enter__()
            return self

        def __exit__(self, *exception: Any) -> Any:
            counter.__exit__(*exception)  # its mode is on top of ours: it goes first
            return super().__exit__(*exception)

    with (
        mock.patch.object(attempts, "Recorder", Counted),
        mock.patch.object(phases_running, "Recorder", Counted),
        mock.patch.object(phases_running, "graph_of", lambda *_: None),
        mock.patch.object(recorder, "kept_whole", contextlib.nullcontext),
        mock.patch.object(running, "whole_entry", lambda func: None),
    ):
        yield
