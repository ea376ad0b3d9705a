"""The largest batch that fits: the search on peaks made up, then on modules and targets."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.memory.footprint import memory
from rooftrace.costmodels.memory.reserving import MOST, largest
from rooftrace.errors import RequestError
from rooftrace.hardware.chipfile import load_chip
from rooftrace.tracer.request import Options, Request

CONFIGS = Path(__file__).resolve().parents[2] / "examples" / "configs"


def tried(peak_of: Callable[[int], int], capacity: int, most: int = MOST) -> tuple[int, int]:
    """What the search finds, and how many batches it asks for."""
    asked: set[int] = set()

    def peak(batch: int) -> int:
        asked.add(batch)
        return peak_of(batch)

    return largest(peak, capacity, most)[0], len(asked)


# -- the search ------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(1, 10**4), st.integers(0, 10**7))
def test_on_a_straight_line_four_peaks_are_enough(first: int, slope: int, capacity: int) -> None:
    found, asked = tried(lambda batch: first + slope * batch, capacity)
    assert found == min(max(0, capacity - first) // slope, MOST)
    assert asked <= 4


@given(st.lists(st.integers(0, 50), min_size=300, max_size=300), st.integers(0, 9000))
def test_on_any_peaks_that_do_not_fall_the_answer_fits_and_the_next_does_not(
    steps: list[int], capacity: int
) -> None:
    peaks = [sum(steps[:batch]) for batch in range(301)]
    found, asked = tried(lambda batch: peaks[batch], capacity, most=300)
    assert found == max((b for b in range(1, 301) if peaks[b] <= capacity), default=0)
    assert asked <= 2 + 2 * 9 + 4  # a line and a half in turns, of 300


def test_where_the_batch_takes_nothing_the_search_ends() -> None:
    assert largest(lambda batch: 5, 10) == (MOST, True)
    assert largest(lambda batch: 5 * batch, 10) == (2, False)
    assert largest(lambda batch: 5, 4) == (0, False)


# -- modules and targets ---------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self, hidden: int = 16384) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, hidden), nn.Linear(hidden, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x).relu())
        return out


@pytest.mark.parametrize("phase", ["forward", "training"])
def test_the_batch_that_is_found_fits_and_one_more_does_not(phase: str) -> None:
    found = rt.largest_batch(Mlp(), torch.empty(2, 900, 256), chip="l4", phases=[phase])
    one = found[phase]["l4"]
    capacity = load_chip("l4").room()  # its memory, less the context of a process
    peaks = [
        memory(rt.trace(Mlp(), torch.empty(batch, 900, 256), phase=phase)).peak
        for batch in (one.batch, one.batch + 1)
    ]
    assert peaks[0] == one.peak <= capacity < peaks[1]
    assert one.batch > 100 and not one.open_ended and one.weights_fit


@pytest.mark.slow  # two searches, each of about twenty traces
def test_a_target_by_phase_and_chip() -> None:
    config, request = CONFIGS / "gpt2.json", Request(seq=512, settings={"config.n_layer": 1})
    found = rt.largest_batch(config, chip=("l4", "h200-sxm"), request=request)
    assert list(found) == ["prefill", "decode", "training"]
    for by_chip in found.values():
        assert 0 < by_chip["l4"].batch < by_chip["h200-sxm"].batch
    assert found["training"]["l4"].batch < found["prefill"]["l4"].batch
    plain = rt.largest_batch(
        config, chip="l4", phases=["training"], request=request, options=Options(optimizer="none")
    )
    assert plain["training"]["l4"].batch > found["training"]["l4"].batch


def test_weights_that_do_not_fit_leave_no_batch() -> None:
    config = CONFIGS / "llama-3.1-405b.json"
    request = Request(seq=16, settings={"config.num_hidden_layers": 6})
    found = rt.largest_batch(config, chip="l4", phases=["decode"], request=request)
    one = found["decode"]["l4"]
    assert one.batch == 0 and not one.weights_fit


def test_a_graph_has_its_batch() -> None:
    graph = rt.trace(Mlp(16), torch.empty(2, 256))
    for source in (graph, {"forward": graph}):
        with pytest.raises(RequestError, match="a graph, which has its sizes"):
            rt.largest_batch(source)


@pytest.mark.parametrize("ends", [False, True])
def test_the_bags_of_a_row_of_indices_are_its_batch(ends: bool) -> None:
    bags = torch.nn.EmbeddingBag(100, 8, mode="sum", include_last_offset=ends)
    offsets = torch.arange(0, 24 + 6 * ends, 6)
    graph = rt.trace(bags, torch.arange(24), offsets)
    assert graph.values[graph.outputs[0]].shape == (4, 8)
    assert graph.workload["batch"] == graph.workload["items"] == 4
    assert rt.trace(bags, torch.zeros(3, 5, dtype=torch.long)).workload["batch"] == 3
    with pytest.raises(
        RequestError, match=r"--batch .*: the first input has the indices of 4 bags"
    ):
        rt.largest_batch(bags, torch.arange(24), offsets, phases=["forward"])


def test_inputs_whose_first_dimension_is_no_batch_are_refused() -> None:
    class Fixed(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.reshape(-1, 256, 1)[:, :, 0].expand(3, 256) * x[0])

    with pytest.raises(RequestError, match="the first dimension of its inputs is not their batch"):
        rt.largest_batch(Fixed(16), torch.empty(1, 256), phases=["forward"])
    with pytest.raises(RequestError, match="no input is a tensor with a first dimension"):
        rt.largest_batch(Mlp(16), 3.0, phases=["forward"])
