"""Layers over many processes stand once: what is computed from them is what all of them give."""

from __future__ import annotations

from collections import Counter

import pytest

import rooftrace as rt
from rooftrace.costmodels.findings.playback import play
from rooftrace.tracer.graph import OpGraph
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


RUN_ALWAYS = ("fsdp, full", "hsdp, selective", "fsdp and tp", "tp")


@pytest.fixture(scope="module", params=mostly_heavy(CASES, RUN_ALWAYS))
def short(request) -> OpGraph:
    mesh, checkpoint = CASES[request.param]
    return rt.trace(
        "llama-3.1-8b", phase="training", seq=256, mesh=mesh, checkpoint=checkpoint, settings=SMALL
    )


@pytest.fixture(scope="module")
def flat(short) -> OpGraph:
    return short.expand()


def test_layers_stand_once(short, flat):
    (repeat,) = short.repeats
    assert repeat.container == "model.layers"
    assert repeat.count == 4  # of eight; two at either end stay, whose neighbours differ
    assert len(flat.ops) == sum(map(short.times, short.ops)) > len(short.ops)


@pytest.mark.parametrize("execution", ["naive", "eager", "compiled", "efficient"])
def test_a_step_costs_what_all_of_its_layers_do(short, flat, execution):
    once, all_of_them = (
        rt.estimate(graph, execution=execution, system="dgx-h100") for graph in (short, flat)
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


def test_a_timeline_shows_each_kernel_where_it_runs(short, flat):
    shown = [
        [
            (estimate.rows[launch.row].name, launch.module, launch.track, round(launch.start, 9))
            for launch in play(estimate).launches
            if launch.row is not None
        ]
        for graph in (short, flat)
        for estimate in [rt.estimate(graph, execution="compiled", system="dgx-h100")]
    ]
    assert shown[0] == shown[1]


def test_what_a_checkpoint_runs_again_is_in_its_own_layer(short):
    """Also ops that a layer runs outside of its modules, as the sum with what came in."""
    flat = short.expand()
    again = Counter(
        op.module for op in flat.ops if op.part == "recompute" and op.name == "aten.add"
    )
    sums = {path: count for path, count in again.items() if path.count(".") == 2}
    assert set(sums.values()) <= {1}
    assert not again or set(sums) == {f"model.layers.{layer}" for layer in range(8)}
