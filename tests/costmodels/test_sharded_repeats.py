"""Layers over many processes stand once: what is computed from them is what all of them give."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache

import pytest
from msgspec.structs import replace
from transformers.models.llama.modeling_llama import LlamaAttention

import rooftrace as rt
from rooftrace.costmodels.estimates import play
from rooftrace.graph import OpGraph
from rooftrace.graph.file import graphs_bytes
from rooftrace.tracer import repeats
from rooftrace.tracer.repeats import fewer
from tests.conftest import mostly_heavy

SMALL = {
    "config.num_hidden_layers": 8,
    "config.hidden_size": 512,
    "config.intermediate_size": 1024,
    "config.num_attention_heads": 8,
    "config.num_key_value_heads": 8,
    "config.head_dim": 64,
    "config.vocab_size": 1024,
}
CASES = {
    "fsdp": ({"dp": 8}, "none"),
    "fsdp, full": ({"dp": 8}, "full"),
    "hsdp, selective": ({"dp_replicate": 2, "dp": 4}, "selective"),
    "fsdp and tp": ({"dp": 4, "tp": 2}, "none"),
    "fsdp and tp, full": ({"dp": 4, "tp": 2}, "full"),
    "tp": ({"tp": 8}, "none"),
}


@cache
def short(case: str) -> OpGraph:
    mesh, checkpoint = CASES[case]
    return rt.trace(
        "llama-3.1-8b", phase="training", seq=256, mesh=mesh, checkpoint=checkpoint, settings=SMALL
    )


@cache
def flat(case: str) -> OpGraph:
    return short(case).expand()


RUN_ALWAYS = ("fsdp, full", "hsdp, selective", "fsdp and tp", "tp")
EXECUTIONS = ("naive", "eager", "compiled", "efficient")
run_always = pytest.mark.parametrize("case", mostly_heavy(CASES, RUN_ALWAYS))


@run_always
def test_layers_stand_once(case):
    (repeat,) = short(case).repeats
    assert repeat.container == "model.layers"
    # Of eight: two at either end stay, whose neighbours differ, and the first one over "tp" takes
    # its part of the sequence.
    assert repeat.count == 4 - ("tp" in CASES[case][0])
    ops = short(case).ops
    assert len(flat(case).ops) == sum(map(short(case).times, ops)) > len(ops)


@pytest.mark.parametrize(
    ("case", "execution"),
    mostly_heavy(
        itertools.product(CASES, EXECUTIONS), list(zip(RUN_ALWAYS, EXECUTIONS, strict=True))
    ),
)
def test_a_step_costs_what_all_of_its_layers_do(case, execution):
    once, all_of_them = (
        rt.estimate(graph, execution=execution, system="dgx-h100")
        for graph in (short(case), flat(case))
    )
    for name in ("flops", "flops_matrix", "bytes_hbm", "bytes_net", "kernels", "processes"):
        assert getattr(once, name) == getattr(all_of_them, name), name
    for name in ("t_est", "t_exposed", "t_comp", "t_hbm", "t_net", "t_bound", "t_launch"):
        told = getattr(once.times, name)
        assert told == pytest.approx(getattr(all_of_them.times, name), rel=1e-9), name
    for name in ("peak", "saved", "gathered", "buffers", "weights", "gradients", "optimizer"):
        assert getattr(once.memory, name) == getattr(all_of_them.memory, name), name
    exchanged = [
        {
            (row.axis, row.kind): (
                row.calls,
                row.bytes,
                round(row.seconds, 9),
                round(row.exposed, 9),
            )
            for row in estimate.communication
        }
        for estimate in (once, all_of_them)
    ]
    assert exchanged[0] == exchanged[1]


@pytest.mark.parametrize("case", mostly_heavy(CASES, ["hsdp, selective", "fsdp and tp"]))
def test_a_timeline_shows_each_kernel_where_it_runs(case):
    shown = [
        [
            (estimate.rows[launch.row].name, launch.module, launch.track, round(launch.start, 9))
            for launch in play(estimate).launches
            if launch.row is not None
        ]
        for graph in (short(case), flat(case))
        for estimate in [rt.estimate(graph, execution="compiled", system="dgx-h100")]
    ]
    assert shown[0] == shown[1]


@run_always
def test_what_a_checkpoint_runs_again_is_in_its_own_layer(case):
    """Also ops that a layer runs outside of its modules, as the sum with what came in."""
    again = Counter(
        op.module for op in flat(case).ops if op.part == "recompute" and op.name == "aten.add"
    )
    sums = {path: count for path, count in again.items() if path.count(".") == 2}
    assert set(sums.values()) <= {1}
    assert not again or set(sums) == {f"model.layers.{layer}" for layer in range(8)}


FEW = {
    "dense": ("llama-3.1-8b", {"dp": 2, "tp": 2}, "full", {}),
    "experts": ("mixtral-8x22b", {"dp": 4, "ep": 4}, "none", {"config.num_local_experts": 4}),
    "by number": ("llama-3.1-8b", {"dp": 2}, "none", {}),
}


@pytest.mark.parametrize("case", FEW)
def test_a_few_layers_tell_of_all(case, monkeypatch):
    """The graph of a model of which seven layers were traced is, byte for byte, that of all."""
    model, mesh, checkpoint, more = FEW[case]
    if case == "by number":  # code that looks at a layer's number: all are traced
        monkeypatch.setattr(
            LlamaAttention, "forward", lambda self, *a, _run=LlamaAttention.forward, **k:
            _run(self, *a, **k) if self.layer_idx >= 0 else None,
        )  # fmt: skip

    def traced() -> OpGraph:
        settings = {**SMALL, "config.num_hidden_layers": 14, **more}
        return rt.trace(
            model, phase="training", seq=64, mesh=mesh, checkpoint=checkpoint, settings=settings
        )

    lengths = []
    real = fewer.Shortened.stretched

    def stretched(self, graph, layer):
        longer = real(self, graph, layer)
        lengths.append(longer and longer.repeats[0].count - graph.repeats[0].count)
        return longer

    monkeypatch.setattr(fewer.Shortened, "stretched", stretched)
    few = traced()
    monkeypatch.setattr(repeats, "shorten", lambda model, layers: None)
    assert _plain(few) == _plain(traced())
    assert lengths == [None if case == "by number" else 7]


def _plain(graph: OpGraph) -> bytes:
    """The file of a graph, with groups numbered by their ranks."""
    ranks = sorted(graph.groups, key=lambda name: graph.groups[name].ranks)
    names = {name: str(number) for number, name in enumerate(ranks)}
    ops = tuple(
        op
        if op.collective is None
        else replace(op, collective=replace(op.collective, group=names[op.collective.group]))
        for op in graph.ops
    )
    groups = {names[name]: graph.groups[name] for name in ranks}
    return graphs_bytes({graph.phase: graph.replace(ops=ops, groups=groups)})
