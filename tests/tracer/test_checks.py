"""Checks of values that raise: as torch does on the real tensors, where their values follow."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import rooftrace as rt
from tests.releases import TORCH

pytestmark = pytest.mark.quick

INDEFINITE = torch.tensor([[1.0, 2.0], [2.0, 1.0]])
SINGULAR = torch.zeros(2, 2)
GOOD = torch.tensor([[2.0, 1.0], [1.0, 2.0]])


class Tries(nn.Module):
    """Runs a layer on what a check lets through, and another one where it raises."""

    def __init__(self, run: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.run, self.small, self.other = run, nn.Linear(2, 2), nn.Linear(2, 2)
        self.large = nn.Linear(2, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.other(x) * 0 + x  # so that the value is one to compute, and none that is known
        try:
            self.run(x)
        except RuntimeError:
            return self.small(x)
        return self.large(x)


def asserted(x: Tensor) -> None:
    torch._assert_async(x.det() > 0)


def asserted_with_text(x: Tensor) -> None:
    torch._assert_async(x.det() > 0, "the matrix is not definite")


def checked(x: Tensor) -> None:
    torch._check(bool(x.det() > 0))


CASES = [
    (torch.linalg.cholesky, INDEFINITE),
    (torch.cholesky, INDEFINITE),
    (lambda x: torch.linalg.cholesky_ex(x, check_errors=True), INDEFINITE),
    (torch.linalg.inv, SINGULAR),
    (lambda x: torch.linalg.inv_ex(x, check_errors=True), SINGULAR),
    (lambda x: torch.linalg.solve(x, x), SINGULAR),
    (torch.linalg.lu_factor, SINGULAR),
    (asserted, INDEFINITE),
    (asserted_with_text, INDEFINITE),
    (checked, INDEFINITE),
]


@pytest.mark.filterwarnings("ignore:torch.cholesky is deprecated")
@pytest.mark.parametrize("good", [False, True])
@pytest.mark.parametrize(("run", "bad"), CASES)
def test_a_check_fails_where_it_does_on_real_tensors(
    run: Callable[[Tensor], Any], bad: Tensor, good: bool
) -> None:
    module, x = Tries(run), GOOD if good else bad
    with FlopCounterMode(display=False) as counter:
        module(x)
    graph = rt.trace(module, x)
    assert rt.estimate(graph, execution="eager").flops_matrix == counter.get_total_flops()
    assert "branch" not in {a.kind for a in graph.assumptions}


@pytest.mark.filterwarnings("ignore:torch.cholesky is deprecated")
@pytest.mark.parametrize("run", [case[0] for case in CASES[:7]])
def test_a_check_of_an_unknown_matrix_is_taken_to_pass_and_that_is_said(run: Any) -> None:
    if run is torch.cholesky and TORCH >= (2, 15):
        pytest.skip("torch 2.15 has no torch.cholesky")
    graph = rt.trace(Tries(run).to("meta"), torch.empty(2, 2, device="meta"))
    texts = [a.text for a in graph.assumptions if a.kind == "branch"]
    assert len(texts) == 1 and texts[0].endswith("of an unknown matrix is taken to succeed")


@pytest.mark.parametrize("run", [torch.linalg.eigvalsh, torch.linalg.det, torch.linalg.cholesky_ex])
def test_where_nothing_is_checked_nothing_is_said(run: Any) -> None:
    graph = rt.trace(Tries(run).to("meta"), torch.empty(2, 2, device="meta"))
    assert "branch" not in {a.kind for a in graph.assumptions}


@pytest.mark.parametrize(
    ("read", "index"),
    [
        (lambda table, i: table(i), [1, 5]),
        (lambda table, i: table(i), [-1, 2]),
        (lambda table, i: table.weight[i], [0, 5]),
        (lambda table, i: table.weight[i], [0, -6]),
        (lambda table, i: table.weight[:, i], [3]),
        (lambda table, i: table.weight.index_select(0, i), [5]),
        (lambda table, i: table.weight.gather(1, i[:, None]), [0, 3]),
    ],
)
def test_known_indices_out_of_range_fail_as_on_a_cpu(read: Any, index: list[int]) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 3)

        def forward(self, i: Tensor) -> Any:
            return read(self.table, i)

    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        Reads()(torch.tensor(index))
    with pytest.raises(rt.types.TraceError, match="index out of range"):
        rt.trace(Reads(), torch.tensor(index))


def test_indices_from_the_end_are_in_range() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(5, 3))

        def forward(self, i: Tensor) -> Tensor:
            return self.table[i]

    assert rt.trace(Last(), torch.tensor([-5, 4])).ops
