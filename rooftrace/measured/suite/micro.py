"""Every operation that the suite times alone, and the graph of such an operation from its row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from rooftrace.measured.bench import Bench, launches
from rooftrace.measured.runs import MicroRow, RunFileError
from rooftrace.measured.suite import products, streams
from rooftrace.measured.suite.cases import MicroCase
from rooftrace.tracer import capture
from rooftrace.tracer.graph import OpGraph


def micro_cases(on_cuda: bool) -> list[MicroCase]:
    """Every case for a GPU or a CPU, kind by kind, also those too large for a given device."""
    kinds = (
        _launches,
        products.matmuls,
        products.attention,
        products.convolutions,
        streams.elementwise,
        streams.rows,
        streams.moves,
        products.batched,
        products.grouped,
    )
    return [case for kind in kinds for case in kind(on_cuda)]


def _launches(on_cuda: bool) -> Iterator[MicroCase]:
    def nothing(bench: Bench) -> Callable[[], float]:
        return lambda: bench.cold(lambda: None)

    makers: dict[str, Callable[[Bench], Callable[[], float]]] = {
        "eager op": launches.eager_dispatch,
        "direct op": launches.direct_dispatch,
        "clock alone": nothing,
    }
    if on_cuda:
        makers["stream kernel"] = launches.stream_of_tiny_kernels
        makers["graph kernel"] = lambda bench: launches.graph_of_tiny_kernels(bench)[0]
        makers["graph launch"] = lambda bench: launches.graph_of_tiny_kernels(bench)[1]
    for what, make in makers.items():
        yield MicroCase("launch", {"what": what}, 0.0, 0.0, make, sampler=True)


# -- graphs ----------------------------------------------------------------------------------------


class _OnMeta(Bench):
    """Makes tensors that have sizes only."""

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor of this shape."""
        return torch.empty(shape, dtype=dtype or torch.float32, device="meta")

    def integers(self, below: int, *shape: int) -> torch.Tensor:
        """Whole numbers of this shape."""
        return torch.empty(shape, dtype=torch.int64, device="meta")


def traced_micro(row: MicroRow, on_cuda: bool) -> OpGraph:
    """The graph of the call that `row` timed on a GPU or a CPU.

    Raises RunFileError for a row of no operation (launches), or of a case that this version does
    not have.
    """
    case = _cases(on_cuda).get(row.key)
    if case is None or case.sampler:
        raise RunFileError(f"{row.key!r}: not an operation that this version measures")
    call: Any = case.make(_OnMeta(torch.device("meta"), 0.0, lambda _: None))
    with capture(torch.nn.Module()) as captured:
        call()
    return captured.graph


@cache
def _cases(on_cuda: bool) -> dict[str, MicroCase]:
    return {case.key: case for case in micro_cases(on_cuda)}
