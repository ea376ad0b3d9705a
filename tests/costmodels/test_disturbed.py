"""What-ifs of many processes: by default nothing is slowed, and each slows what it says."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.fusion import ExecutionError
from rooftrace.costmodels.timing.streams import slowest_of
from tests.tracer.sharded_models import WAYS, Net


def graph_of(way: str) -> Any:
    sizes, spread, again = WAYS[way]
    with rt.tools.fake_mesh(sizes) as mesh, torch.device("meta"):
        net = spread(Net(again=again), mesh)
        return rt.trace(net, torch.zeros(2, 16, dtype=torch.long), phase="training")


def timed(graph: Any, **disturbances: float) -> Any:
    model = rt.tools.execution_model("efficient", disturbances=disturbances)
    return rt.estimate(graph, execution=model, system="dgx-h100")


@pytest.fixture(scope="module")
def fsdp() -> Any:
    return graph_of("fsdp")


def test_the_slowest_of_many_is_what_a_draw_says() -> None:
    draw = random.Random(0)
    for count in (2, 8, 64):
        mean = sum(max(draw.gauss(0, 1) for _ in range(count)) for _ in range(20_000)) / 20_000
        assert slowest_of(count) == pytest.approx(mean, abs=0.03)
    assert slowest_of(1) == 0


def test_all_wait_for_the_slowest_chip(fsdp: Any) -> None:
    plain, slow = timed(fsdp), timed(fsdp, stragglers=0.1)
    more = slow.t_est - plain.t_est
    alone = sum(row.timing.t_device for row in plain.rows if not row.bytes_net)
    assert 0 < more <= 0.1 * slowest_of(4) * alone * (1 + 1e-9)
    assert slow.times.t_exposed - plain.times.t_exposed == pytest.approx(more)
    waited = sum(row.exposed for row in slow.communication)
    assert waited == pytest.approx(slow.times.t_exposed)


def test_exchanges_beside_computing_slow_it(fsdp: Any) -> None:
    plain, slow, slower = (timed(fsdp, interference=share) for share in (0.0, 0.2, 0.4))
    assert plain.t_est < slow.t_est < slower.t_est
    hidden = sum(row.seconds - row.exposed for row in plain.communication)
    assert slow.t_est - plain.t_est <= 0.2 * hidden * 1.5


def test_one_process_has_nothing_to_be_disturbed_by() -> None:
    with torch.device("meta"):
        graph = rt.trace(nn.Linear(8, 8), torch.zeros(2, 8), phase="training")
    with pytest.raises(rt.types.RequestError, match="it is of steps of several processes"):
        timed(graph, stragglers=0.5, interference=0.5, expert_imbalance=2.0)


@pytest.mark.parametrize(
    "disturbances", [{"stragglers": -0.1}, {"interference": "much"}, {"expert_imbalance": 0.5}]
)
def test_numbers_that_mean_nothing_are_refused(disturbances: dict[str, Any]) -> None:
    with pytest.raises(ExecutionError, match=next(iter(disturbances))):
        rt.tools.execution_model("eager", disturbances=disturbances)
