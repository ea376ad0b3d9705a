"""The pytest plugin: the fixture `cost_of`, and the marker `costs` that checks its results.

    def test_it_stays_small(cost_of):
        assert cost_of(Net(), x).flops <= 2e9

    @pytest.mark.costs(flops="<= 2 GFLOP", time="<= 5 ms", chip="l4")
    def test_it_stays_fast(cost_of):
        cost_of(Net(), x)

pytest imports this file at its start: nothing slow is imported before a test asks for a cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rooftrace.costmodels.estimates import Estimate
    from rooftrace.diffs import Limit

_MARKER = (
    "costs(flops=, bytes=, time=, memory=, params=, kernels=, chip=, phase=, ...): the most that "
    'each call of the fixture cost_of may cost, as "<= 2 GFLOP", "<= 5 ms" or a number in SI units'
)


@dataclass(frozen=True, repr=False)
class StepCosts:
    """The costs of a step: plain numbers in SI units."""

    flops: int
    bytes: int  # through HBM
    time: float  # seconds, expected
    memory: int  # bytes alive at the peak
    params: int
    kernels: int
    estimate: Estimate = field(compare=False)  # which prints as a table

    def __repr__(self) -> str:
        from rooftrace.diffs.changes import TOTALS

        result = self.estimate
        costs = ", ".join(f"{n} {metric.write(getattr(self, n))}" for n, metric in TOTALS.items())
        return f"<{result.graph.title} on {result.chip.name}, {result.execution.name}: {costs}>"


CostOf = Callable[..., StepCosts]


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, so that --strict-markers accepts it."""
    config.addinivalue_line("markers", _MARKER)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse a marker on a test without the fixture."""
    if any(item.iter_markers("costs")) and "cost_of" not in getattr(item, "fixturenames", ()):
        pytest.fail(
            "@pytest.mark.costs holds what the fixture cost_of returns, and this test does not "
            "take it: def test(cost_of): cost_of(model, x)",
            pytrace=False,
        )


@pytest.fixture
def cost_of(request: pytest.FixtureRequest) -> Iterator[CostOf]:
    """cost_of(model, x, chip=, execution=, phase=): the costs of one step of a module.

    Takes the arguments of `rooftrace.estimate`.  @pytest.mark.costs has limits for every call in a
    test, and the chip, phase ... of calls that do not name them.
    """
    limits, usual = _marked(request.node)
    called: list[StepCosts] = []

    def call(model: Any, *args: Any, **named: Any) -> StepCosts:
        from rooftrace.reporting.commands import estimate

        made = estimate(model, *args, **{**usual, **named})
        totals: dict[str, Any] = made.totals
        costs = StepCosts(**totals, estimate=made)
        called.append(costs)
        _hold(costs, limits)
        return costs

    yield call
    if limits and not called:
        pytest.fail("@pytest.mark.costs: this test never called cost_of", pytrace=False)


def _marked(item: pytest.Item) -> tuple[dict[str, Limit], dict[str, Any]]:
    """The limits of a test's markers, and arguments for its calls; the nearest marker wins."""
    from rooftrace.diffs.changes import TOTALS
    from rooftrace.errors import one_of
    from rooftrace.reporting.commands.calls import CALLS
    from rooftrace.reporting.gates.lock import BudgetError, most

    how = ("phase", *(each.name for each in CALLS["estimate"].options() if each.name != "phases"))
    limits: dict[str, Limit] = {}
    usual: dict[str, Any] = {}
    for marker in reversed(list(item.iter_markers("costs"))):
        where = "@pytest.mark.costs"
        if marker.args:
            pytest.fail(f"{where}: {marker.args[0]!r:.60}: say it by name, as {_MARKER}", False)
        for name, value in marker.kwargs.items():
            if name in how:
                usual[name] = value
                continue
            if name not in TOTALS:
                names = (*TOTALS, *how)
                pytest.fail(
                    f"{where}({name}=...): {one_of(name, names)}",
                    False,
                )
            try:
                limits[name] = most(name, value, f"{where}({name}")
            except BudgetError as error:
                pytest.fail(f"{error})", False)
    return limits, usual


def _hold(costs: StepCosts, limits: Mapping[str, Limit]) -> None:
    """Fail the test if a cost is over its limit."""
    from rooftrace.reporting.gates.lock import in_full

    lines = [
        f"{name} is {in_full(name, getattr(costs, name))}, expected {limit.text}"
        for name, limit in limits.items()
        if getattr(costs, name) > limit.most
    ]
    if lines:
        pytest.fail("\n".join([repr(costs), *lines]), pytrace=False)
