"""The graph of an operation that a run measured alone: the same call on meta, nothing computed."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from rooftrace.measured.bench import Bench, MicroRow, RunFileError
from rooftrace.measured.suite.micro import MicroCase, micro_cases
from rooftrace.tracer import capture
from rooftrace.tracer.graph import OpGraph


class _OnMeta(Bench):
    """Makes tensors that have sizes only."""

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor of this shape."""
        return torch.empty(shape, dtype=dtype or torch.float32, device="meta")

    def integers(self, below: int, *shape: int) -> torch.Tensor:
        """Whole numbers of this shape."""
        return torch.empty(shape, dtype=torch.int64, device="meta")


def traced_micro(row: MicroRow, on_cuda: bool) -> OpGraph:
    """The graph of the one call that `row` timed on such a device.

    Raises RunFileError for a row that is about no operation (launches), or that this version does
    not measure.
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
