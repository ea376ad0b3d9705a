"""Patterns of real code, each against a count of its products on real CPU tensors.

A pattern is a function in one of the files of this folder:

    @pattern
    def gradient_accumulation() -> Case:
        \"\"\"Three uneven micro-batches before one optimizer step.\"\"\"
        model = nn.Linear(6, 10)
        return Case(step, (model, torch.randn(7, 6)))

It builds a module, or a step whose first argument is a module, with real tensors.  All are small,
and no two sizes are equal, so that a wrong count cannot cancel.  The seed is set before it is
called, and every use calls it again.  The docstring says what is hard about it.

What is checked of each:

- The FLOPs of its products are those of the same code on real tensors, outside of rooftrace
  (`harness.counted`: arithmetic from the sizes of each call), and where the pattern gives
  `expected`, those of arithmetic by hand.  Calls of heavy ops without an agreed formula (FFT,
  factorisations) are as many, and where an optimizer steps, the graph has its ops.
- Where they differ, the result names it: `named` of the pattern has the kinds of assumption that
  are allowed to.
- With `recompute=True`, `build(recompute=False)` is the same without checkpoints: its count is
  the model's FLOPs, and the rest is what rooftrace must call recomputation.
- Nothing that the caller can reach has changed, nothing is left behind in the process, and a
  second trace is equal.
"""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass, replace
from functools import cache

import pytest

import rooftrace as rt
from rooftrace.costmodels.ops.cost import MATRIX
from rooftrace.costmodels.ops.price import price_ops

from . import harness
from .harness import PATTERNS, Case, Count, Pattern, counted, fingerprint, is_heavy, process_state

FILES = (
    "training_steps", "wrappers", "subclasses", "threads", "offload", "policies", "functions",
    "science", "rl", "control_flow", "inference",
)  # fmt: skip
for _file in FILES:
    importlib.import_module(f".{_file}", __package__)

EVERYWHERE = ("loss", "optimizer", "inputs")
"""Assumptions that explain no difference: the test runs the same loss and the same inputs."""
KNOWN_TO_TORCH = {
    f"aten::{op}" for op in ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")
}
"""Ops that FlopCounterMode has a formula for, of those that run on a CPU."""
UNSEEN_BY_TORCH = (
    "threads.",
    "subclasses.sparse_csr_weight",
    "science.fourier_operator",
    "inference.grouped_and_transposed_convolutions",
)
"""It counts one thread, sparse products as dense, complex ones as real, and of groups too much."""


# What is parametrised in a module's scope runs pattern by pattern: all tests of one share its runs.
each_pattern = pytest.mark.parametrize("name", sorted(PATTERNS), scope="module")


def ready(name: str) -> Pattern:
    for library in PATTERNS[name].needs:
        pytest.importorskip(library)
    return PATTERNS[name]


def traced(case: Case) -> rt.types.OpGraph:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return rt.trace(case.run, *case.args, **case.options, **case.kwargs)


@cache
def really(name: str) -> Count:
    """What the pattern computes for real."""
    return counted(PATTERNS[name].case())


@dataclass(frozen=True)
class Watched:
    """A trace, what it changed of the case, what it left behind, and a second trace of the case."""

    graph: rt.types.OpGraph
    changed: list[str]
    left: list[str]
    again: rt.types.OpGraph


@cache
def watched(name: str) -> Watched:
    case = PATTERNS[name].case()
    roots = (case.run, case.args, case.kwargs, case.options)
    before, state = fingerprint(*roots), process_state()
    graph = traced(case)
    after = process_state()
    left = [key for key in state if key in after and state[key] != after[key]]
    return Watched(graph, harness.unequal(before, fingerprint(*roots)), left, traced(case))


def flops_of(graph: rt.types.OpGraph) -> tuple[int, int]:
    """FLOP of the products of a graph: without recomputation, and those that run a second time."""
    once, twice = rt.estimate(graph, chip="h200-sxm", execution="eager").flops_matrix, 0
    for op, cost in zip(graph.ops, price_ops(graph)[0], strict=True):
        vector = op.name.split(".", 1)[1] in harness.VECTOR_PRODUCTS or "stored" in op.facts
        once += cost.flops() * graph.times(op) if vector else 0
        if op.part == "recompute":
            twice += cost.flops(MATRIX, ("recompute",)) * graph.times(op)
            twice += cost.flops(counts=("recompute",)) * graph.times(op) if vector else 0
    return once, twice


def calls_of(graph: rt.types.OpGraph) -> list[str]:
    """What runs, in any order."""
    sizes = [t.shape for t in graph.values]
    return sorted(
        f"{op.target} {op.part} {[sizes[i] for i in op.inputs]} {graph.times(op)}"
        for op in graph.ops
    )


def heavy_of(graph: rt.types.OpGraph) -> list[str]:
    return sorted(
        name
        for op in graph.ops
        for name in [op.target.rsplit(".", 1)[0]] * graph.times(op)
        if op.kind == "kernel" and is_heavy(op.name)
    )


@each_pattern
def test_products_are_those_of_real_tensors(name: str) -> None:
    pattern = ready(name)
    real = really(name)
    model = counted(pattern.case(recompute=False)) if pattern.recompute else real
    graph = watched(name).graph
    ours, twice = flops_of(graph)
    kinds = sorted({a.kind for a in graph.assumptions} - set(EVERYWHERE))
    heavy = sorted(real.heavy)
    equal = (ours, ours + twice, heavy_of(graph)) == (model.flops, real.flops, heavy)
    if not (pattern.named and set(kinds) & set(pattern.named)):
        assert equal, f"{ours} + {twice} FLOP, really {real.by_op} and {heavy}; assumed {kinds}"
    if real.steps:  # of Adam and its like nothing is a product
        assert any(op.part == "optimizer" for op in graph.ops), f"no step of {set(real.steps)}"
    assert not rt.estimate(graph).unsupported_ops()


@each_pattern
def test_nothing_is_changed_or_left_behind(name: str) -> None:
    ready(name)
    found = watched(name)
    assert not found.left
    assert not found.changed
    first, second = (replace(graph, provenance={}) for graph in (found.graph, found.again))
    if PATTERNS[name].ordered:  # as text: a constant that is nan is not equal to itself
        assert repr(second) == repr(first)
    assert calls_of(first) == calls_of(second)


@each_pattern
def test_the_counter_agrees_with_arithmetic_and_with_torch(name: str) -> None:
    pattern = ready(name)
    real = really(name)
    assert real.flops or real.heavy, "nothing to count"
    expected = pattern.case().expected
    if expected is not None:
        assert real.flops == expected
    if set(real.by_op) - KNOWN_TO_TORCH or name.startswith(UNSEEN_BY_TORCH):
        return
    try:
        theirs = harness.torch_count(pattern.case())
    except (RuntimeError, TypeError) as error:  # the hooks of its module tree fail in some steps
        known = ("_will_engine_execute_node", "Multiple dispatch", "cannot view shape")
        assert any(words in str(error) for words in known)
        return
    assert theirs.get_total_flops() == real.flops
