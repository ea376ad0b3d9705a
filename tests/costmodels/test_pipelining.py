"""Pipelines walked: closed forms of published schedules, torch's own simulator, what is alive."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from rooftrace.costmodels.timing import StageCost, live_microbatches, pipelined, walk_table
from rooftrace.costmodels.timing.pipelines import moments
from rooftrace.errors import RequestError
from rooftrace.hardware.systems import load_system
from rooftrace.tracer.sharding import SCHEDULES, Action, stages_of, table_of

pytestmark = pytest.mark.quick

FORWARD, BACKWARD = 3.0, 5.0


def seconds(action):
    """Equal stages; half of a backward is for weights."""
    halves = {"backward_input": BACKWARD / 2, "backward_weight": BACKWARD / 2}
    return {"forward": FORWARD, "backward": BACKWARD, **halves}[action.kind]


sizes = st.tuples(st.integers(1, 6), st.integers(1, 12))


@given(sizes, st.sampled_from(["gpipe", "1f1b"]))
def test_equal_stages_take_microbatches_plus_stages_less_one(size, schedule):
    ranks, microbatches = size[0], size[0] + size[1] - 1
    walked = walk_table(table_of(schedule, ranks, microbatches), seconds)
    assert walked.seconds == (microbatches + ranks - 1) * (FORWARD + BACKWARD)
    assert walked.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (8, 16)])
@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "looped-bfs"])
@pytest.mark.parametrize("each", [2, 3, 7])
def test_interleaving_divides_the_bubble(schedule, ranks, microbatches, each):
    """Narayanan et al. 2021: with v stages a process, v M + P - 1 stage times."""
    walked = walk_table(table_of(schedule, ranks, microbatches, each), seconds)
    assert walked.seconds == (each * microbatches + ranks - 1) * (FORWARD + BACKWARD)


@pytest.mark.parametrize(("ranks", "each"), [(2, 2), (4, 3), (8, 2)])
def test_interleaving_keeps_more_microbatches(ranks, each):
    """The first process holds L (1 + (P - 1) / (P v)) layers of one microbatch each, of L in all
    (Korthikanti et al. 2022, section 4.2.3); a stage has L / (P v) of them."""
    walked = walk_table(table_of("interleaved-1f1b", ranks, 4 * ranks, each), seconds)
    most = max(sum(alive.values()) for rank, alive in moments(walked) if rank == 0)
    assert most == ranks * each + ranks - 1


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (8, 16)])
@pytest.mark.parametrize("schedule", ["zero-bubble", "zbv"])
def test_gradients_of_weights_fill_bubbles(schedule, ranks, microbatches):
    """With F = I = W = 1 only the forwards of the stages ahead are waited for (Qi et al. 2023)."""
    walked = walk_table(table_of(schedule, ranks, microbatches), lambda action: 1.0)
    assert walked.seconds == 6 * microbatches + ranks - 1


@pytest.mark.parametrize("schedule", [name for name, (made, _) in SCHEDULES.items() if made])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8)])
def test_torch_simulates_the_same_actions(schedule, ranks, microbatches):
    """Torch's own simulator gets through our table, with sends and receives, in the same order."""
    count = stages_of(schedule, ranks)
    table = table_of(schedule, ranks, microbatches)
    home = {action.stage: rank for rank, actions in table.items() for action in actions}
    names = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}

    def torchs(action):
        kind = torch_schedules._ComputationType(names[action.kind])
        return torch_schedules._Action(action.stage, kind, action.microbatch)

    order = {rank: [torchs(a) for a in actions] for rank, actions in table.items()}
    lowered = torch_schedules._add_send_recv(order, home.__getitem__, count)
    simulated = torch_schedules._simulate_comms_compute(lowered, home.__getitem__, count)
    for rank, steps in simulated.items():
        computed = [step for step in steps if step is not None and step.is_compute_op]
        assert computed == [torchs(action) for action in table[rank]]


@given(sizes, st.sampled_from(sorted(SCHEDULES)))
def test_every_microbatch_goes_once_through_every_stage(size, schedule):
    ranks, microbatches = max(2, size[0]), 2 * max(2, size[0]) * (1 + size[1] % 3)
    table = table_of(schedule, ranks, microbatches)
    counts = Counter((a.stage, a.kind, a.microbatch) for actions in table.values() for a in actions)
    assert set(counts.values()) == {1}
    for stage in range(stages_of(schedule, ranks)):
        for number in range(microbatches):
            kinds = {kind for s, kind, m in counts if (s, m) == (stage, number)}
            assert "forward" in kinds
            assert "backward" in kinds or {"backward_input", "backward_weight"} <= kinds
    ends = {
        (r.action.stage, r.action.kind, r.action.microbatch): r
        for r in walk_table(table, seconds).runs
    }
    for (stage, kind, number), run in ends.items():
        if kind == "forward" and stage:
            assert run.start >= ends[stage - 1, "forward", number].end
        if kind != "forward":
            assert run.start >= ends[stage, "forward", number].end


def test_live_microbatches_of_1f1b_are_the_stages_ahead():
    walked = walk_table(table_of("1f1b", 4, 9), seconds)
    assert live_microbatches(walked) == {rank: {rank: 4 - rank} for rank in range(4)}
    walked = walk_table(table_of("gpipe", 4, 9), seconds)
    assert live_microbatches(walked) == {rank: {rank: 9} for rank in range(4)}


def test_a_transfer_is_waited_for_once_a_stage():
    walked = walk_table(table_of("gpipe", 3, 1), seconds, transfer=1.0)
    assert walked.seconds == 3 * (FORWARD + BACKWARD) + 2 * 2  # there and back


def test_a_slow_stage_sets_the_pace():
    slow = lambda action: seconds(action) * (2 if action.stage == 1 else 1)  # noqa: E731
    walked = walk_table(table_of("1f1b", 2, 40), slow)
    assert walked.seconds >= 40 * 2 * (FORWARD + BACKWARD)
    assert walked.imbalance == pytest.approx(1 / 3)


def test_a_table_in_which_all_wait_is_refused():
    table = {0: (Action(0, "backward", 0),), 1: (Action(1, "forward", 0),)}
    with pytest.raises(ValueError, match="cannot go on"):
        walk_table(table, seconds)


@pytest.mark.parametrize(
    ("schedule", "microbatches", "each", "text"),
    [
        ("1f1bb", 8, None, "did you mean"),
        ("1f1b", 3, None, "at least 4"),
        ("interleaved-1f1b", 9, None, "--microbatches 9"),
        ("gpipe", 0, None, "at least 1"),
        ("1f1b", 8, 2, "--interleave 2 with --schedule 1f1b: expected 1"),
        ("zbv", 8, 3, "--interleave 3 with --schedule zbv: expected 2"),
        ("looped-bfs", 8, 1, "--interleave 1 .* at least 2"),
    ],
)
def test_what_a_schedule_refuses(schedule, microbatches, each, text):
    with pytest.raises(RequestError, match=text):
        table_of(schedule, 4, microbatches, each)


def test_peaks_hold_what_is_alive():
    cost = StageCost(forward=1.0, backward=2.0, weights=1.0, once=0.5, saved=10, peak=100)
    made = pipelined(dict.fromkeys(range(4), cost), "1f1b", 8, 1 << 20, load_system("dgx-h100"), 8)
    assert made.peaks == (130, 120, 110, 100)  # what one microbatch takes, and 10 for each other
    assert made.seconds > (8 + 4 - 1) * 3.0 + 0.5
