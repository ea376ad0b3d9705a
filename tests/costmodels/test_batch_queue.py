"""The queue over points: at each of them what the queue of one step says."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from rooftrace.costmodels.fusion.executions import execution_model
from rooftrace.costmodels.fusion.plans import Launch
from rooftrace.costmodels.timing.queue import host_seconds, schedule
from rooftrace.costmodels.timing.timings import Clocked
from rooftrace.hardware.chipfile import load_chip
from tests.costmodels.batch_support import bare_step

POINTS = 4
CHIP = load_chip("h100-sxm")


@dataclass(frozen=True)
class Case:
    launches: tuple[Launch, ...]
    durations: np.ndarray  # [kernels, POINTS]
    counts: np.ndarray  # [repeats, POINTS]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Launches with repeats inside repeats; durations and counts that differ between points."""
    launches: list[Launch] = []
    repeats = 0

    def body(inside: tuple[int, ...]) -> None:
        nonlocal repeats
        for _ in range(draw(st.integers(1, 4))):
            if len(inside) < 3 and draw(st.integers(0, 3)) == 0:
                repeats += 1
                body((*inside, repeats - 1))
            else:
                launches.append(
                    Launch(
                        draw(st.integers(0, 3)),
                        draw(st.booleans()),
                        draw(st.integers(0, 5)) == 0,
                        inside,
                        views=draw(st.integers(0, 2)),
                    )
                )

    body(())
    seconds = st.floats(0, 3e-5)
    placed = sum(launch.on_device for launch in launches)
    durations = draw(st.lists(st.tuples(*[seconds] * POINTS), min_size=placed, max_size=placed))
    count = st.integers(1, 9) if draw(st.booleans()) else st.sampled_from([1, 2, 3, 1000])
    counts = draw(st.lists(st.tuples(*[count] * POINTS), min_size=repeats, max_size=repeats))
    return Case(
        tuple(launches),
        np.array(durations).reshape(placed, POINTS),
        np.array(counts, dtype=int).reshape(repeats, POINTS),
    )


@settings(deadline=None, max_examples=300)
@given(cases(), st.sampled_from(["eager", "compiled", "efficient"]), st.booleans())
def test_random_launches_end_when_each_point_alone_ends(
    case: Case, execution: str, same: bool
) -> None:
    model = execution_model(execution)
    counts = case.counts[:, :1] if same else case.counts
    step = bare_step(
        len(case.durations), case.launches, execution, points=POINTS, counts=tuple(counts)
    )
    ends = []
    for point in range(POINTS):
        durations = case.durations[:, point].tolist()
        turns = (case.counts[:, 0] if same else case.counts[:, point]).tolist()
        ends.append(schedule(durations, case.launches, host_seconds(model, CHIP), turns)[1])
    each = case.durations.ravel()
    seconds = Clocked(each, np.zeros(len(each)), np.zeros(POINTS))
    durations = step.launched(seconds, slice(None))
    host = host_seconds(model, CHIP)
    told = schedule(durations, case.launches, host, step.counted(slice(None)))[1]
    assert told == pytest.approx(np.array(ends), rel=1e-12, abs=0)
