"""The profiled steps beside their estimate, and what a reader of the figures should know."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rooftrace._shown import some
from rooftrace.errors import worded
from rooftrace.measured.live.graphbook import GraphBook
from rooftrace.measured.live.profiles import FewSteps
from rooftrace.measured.validate import Validation, validated

_OWN_GRAPH = (
    "counted is the graph that was handed in, for steps that do what the first timed one did"
)
_NONE_YET = "no step was profiled, so single kernels are not compared"
_SHOWN = 5
"""Names, and assumptions, in one note."""


class ProfileCheck:
    """Sets the profiled steps beside the estimate of the first of them, once."""

    def __init__(self, few: FewSteps, book: GraphBook) -> None:
        self._few, self._book = few, book
        self._made: Validation | str = _NONE_YET

    def checked(self) -> Validation | str:
        """The comparison, or why there is none."""
        if self._made == _NONE_YET and not self._few.active:
            self._made = self._check()
        return self._made

    def _check(self) -> Validation | str:
        if self._few.trouble:
            return self._few.trouble
        trace = self._few.trace()
        if trace is None:
            return _NONE_YET
        book = self._book
        try:
            graph = book.whole(self._few.ran[0])
            return validated(trace, book.chip, book.execution, lambda: {graph.phase: graph})
        except Exception as error:  # a step that does not trace, or a profile of something else
            return f"kernels are not compared: {worded(error).splitlines()[0]}"


def outside_of(validation: Validation) -> dict[str, float]:
    """Seconds of a step by the name of calls that are in no predicted kernel, most first."""
    sums: dict[str, float] = {}
    for _, stray in validation.strays:
        sums[stray.name] = sums.get(stray.name, 0.0) + stray.seconds
    return dict(sorted(sums.items(), key=lambda entry: -entry[1]))


def remarks(
    checked: Validation | str, book: GraphBook, device: torch.device, counted: str
) -> Iterator[str]:
    """What was not counted or compared, and what the counts rest on, in sentences.

    counted: what the counts of the book's traces have and have not.
    """
    for reason, kinds in book.refused.items():
        yield f"{reason} ({kinds:,} kinds of steps or parts)" if kinds > 1 else reason
    if isinstance(checked, str):
        yield checked
        kind = "gpu" if device.type == "cuda" else "cpu"
        if kind != book.chip.kind:
            yield (
                f"ran on a {kind.upper()}, predicted for {book.chip.title}: MFU and expected "
                "times compare two devices"
            )
    else:
        yield from checked.notes
    if book.unknown:
        names = some(book.unknown, _SHOWN)
        yield f"no rule for {names}: only their bytes are counted; the FLOP are a lower bound"
    if book.assumed:
        yield f"assumed: {some(book.assumed, _SHOWN)}"
    if book.fitted:
        yield (
            f"{book.fitted:,} sizes of calls are between those that were traced, and are priced by "
            "a fit that meets those: FLOP in products exactly, MFU within 1 %, expected seconds "
            "within 5 %"
        )
    yield counted if book.graph is None else _OWN_GRAPH
    processes = _processes()
    if processes > 1:
        yield (
            f"figures are of one of {processes:,} processes and its device; what they exchange is "
            "in the time alone"
        )


def _processes() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return 1
