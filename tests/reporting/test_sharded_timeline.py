"""Timelines of steps over many processes: a track for each stream, with the seconds of the walk."""

from __future__ import annotations

import itertools
from collections import defaultdict
from functools import cache
from typing import Any

import pytest
import torch

import rooftrace as rt
from rooftrace.reporting.figures.timeline import timeline
from tests.conftest import in_turn
from tests.tracer.sharded_models import BATCH, SEQ, WAYS, Net

ROUNDING = 2e-6  # microseconds: starts and durations are rounded to the picosecond


@cache
def traced(way: str, layers: int) -> rt.types.OpGraph:
    sizes, spread, again = WAYS[way]
    with rt.tools.fake_mesh(sizes) as mesh, torch.device("meta"):
        net = spread(Net(layers, again), mesh)
        return rt.trace(net, torch.zeros(BATCH, SEQ, dtype=torch.long), phase="training")


def estimated(way: str, system: str = "dgx-h200", layers: int = 3) -> Any:
    return rt.estimate(traced(way, layers), system=system)


def tracks(contents: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The slices of each predicted track by its title, in the order of their starts."""
    titles = {
        event["tid"]: event["args"]["name"]
        for event in contents["traceEvents"]
        if event["name"] == "thread_name"
    }
    slices: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in contents["traceEvents"]:
        if event["ph"] == "X":
            slices[titles[event["tid"]]].append(event)
    return slices


def end(event: dict[str, Any]) -> float:
    return event["ts"] + event["dur"]


@pytest.mark.parametrize(("way", "system"), in_turn(WAYS, ["dgx-h200", "l40s-pcie"]))
def test_the_tracks_of_a_sharded_step_are_its_estimate(way: str, system: str) -> None:
    step = estimated(way, system)
    by_track = tracks(timeline(step))
    flat = {title: events for title, events in by_track.items() if title != "modules"}
    for title, events in flat.items():
        for before, after in itertools.pairwise(events):
            assert end(before) <= after["ts"] + ROUNDING, title
    assert max(end(event) for events in flat.values() for event in events) == pytest.approx(
        step.t_est * 1e6, abs=ROUNDING
    )
    made = [event for events in flat.values() for event in events if "axis" in event["args"]]
    assert len(made) == sum(exchange.calls for exchange in step.exchanges)
    assert sum(event["dur"] for event in made) == pytest.approx(
        1e6 * sum(exchange.calls * exchange.seconds for exchange in step.exchanges)
    )
    assert sum(event["dur"] for event in made) == pytest.approx(1e6 * step.times.t_net)
    assert sum(event["args"]["exposed_us"] for event in made) == pytest.approx(
        1e6 * sum(exchange.exposed for exchange in step.exchanges), abs=1e-3
    )
    groups = {group.axis: list(group.ranks) for group in step.graph.groups.values()}
    for event in made:
        facts = event["args"]
        assert facts["ranks"] == groups[facts["axis"]]
        assert facts["exposure"] in ("exposed", "partly exposed", "hidden")
        assert (facts["exposure"] == "hidden") == (facts["exposed_us"] == 0)


def test_weights_gathered_ahead_run_on_a_stream_of_their_own() -> None:
    by_track = tracks(timeline(estimated("fsdp")))
    kinds = {event["args"].get("collective") for event in by_track["stream all_gather"]}
    assert kinds - {None} == {"all_gather"}
    kinds = {event["args"].get("collective") for event in by_track["stream reduce_scatter"]}
    assert kinds - {None} == {"reduce_scatter"}
    assert all("axis" not in event["args"] for event in by_track["device"])


def test_iterations_that_are_folded_have_a_span_on_every_track() -> None:
    step = estimated("tp", layers=12)
    whole, short = (timeline(step, limit=limit) for limit in (50_000, 10))
    assert len(short["traceEvents"]) < len(whole["traceEvents"])
    by_track = tracks(short)
    for title, events in by_track.items():
        if title != "modules":
            for before, after in itertools.pairwise(events):
                assert end(before) <= after["ts"] + ROUNDING
    last = max(end(event) for events in by_track.values() for event in events)
    assert last == pytest.approx(step.t_est * 1e6, abs=ROUNDING)
