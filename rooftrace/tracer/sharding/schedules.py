"""The order of work of each process of a pipeline, as torch's schedules plan it.

Schedules of several stages a process plan it when they are made, which needs no processes.  Those
of one stage a process do it as they run; their order is written here: all forwards and then all
backwards (GPipe, Huang et al. 2019), or one forward and one backward in turn after as many forwards
as there are stages ahead (1F1B, Narayanan et al. 2021).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rooftrace.errors import RequestError, one_of

SCHEDULES: Mapping[str, tuple[str, int]] = {
    "gpipe": ("", 1),
    "1f1b": ("", 1),
    "interleaved-1f1b": ("Interleaved1F1B", 2),
    "looped-bfs": ("LoopedBFS", 2),
    "zero-bubble": ("InterleavedZeroBubble", 2),
    "zbv": ("ZBVZeroBubble", 2),
    "dualpipev": ("DualPipeV", 2),
}
"""By name: torch's name of a schedule that plans ahead, and stages that a process usually has."""
_KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward_input",
    "W": "backward_weight",
}
V_SHAPED = frozenset({"zbv", "dualpipev"})
"""Schedules in which the first process has the last stage, too."""


def schedule_of(schedule: str | None, interleave: int | None) -> str:
    """The schedule that is asked for; by default 1F1B, interleaved where a process has several
    stages."""
    return schedule or ("1f1b" if interleave in (None, 1) else "interleaved-1f1b")


def stages_of(schedule: str, ranks: int, interleave: int | None = None) -> int:
    """How many stages a schedule has over so many processes.

    interleave: stages of each process; None: as many as is usual.  Raises RequestError for a
    schedule that there is not, and for a number of stages that it cannot have.
    """
    planned, usual = _known(schedule)
    each = usual if interleave is None else interleave
    fixed = not planned or schedule in V_SHAPED
    if each != usual if fixed else each < 2:
        expected = f"{usual}" if fixed else "at least 2"
        raise RequestError(
            f"--interleave {each} with --schedule {schedule}: expected {expected}, the stages that "
            "a process has in it"
        )
    return ranks * each


def table_of(
    schedule: str, ranks: int, microbatches: int, interleave: int | None = None
) -> dict[int, tuple[Action, ...]]:
    """The actions of each process in order, by its rank.

    interleave: see `stages_of`.  Raises RequestError as that does, and for a number of microbatches
    that the schedule refuses.
    """
    planned, count = _known(schedule)[0], stages_of(schedule, ranks, interleave)
    if microbatches < 1 or ranks < 1:
        raise RequestError(
            f"--microbatches {microbatches} over {ranks} stages: expected at least 1 of each"
        )
    if not planned:
        if schedule == "1f1b" and microbatches < ranks:
            raise RequestError(
                f"--microbatches {microbatches} with --schedule 1f1b: expected at least {ranks}, "
                "one for each stage"
            )
        order = _gpipe if schedule == "gpipe" else _one_by_one
        return {rank: tuple(order(rank, ranks, microbatches)) for rank in range(ranks)}
    from torch.distributed.pipelining import schedules

    stages = [0, count - 1] if schedule in V_SHAPED else range(0, count, ranks)
    stubs: Any = [_Stub(index, count, 0, ranks) for index in stages]
    find: Any = schedules.get_schedule_class
    try:
        made = find(planned)(stubs, microbatches, loss_fn=lambda *_: 0)
    except (ValueError, AssertionError) as error:
        reason = " ".join(str(error).split())
        raise RequestError(
            f"--schedule {schedule} --microbatches {microbatches} over {ranks} processes: {reason}"
        ) from None
    return {rank: tuple(_actions(order)) for rank, order in sorted(made.pipeline_order.items())}


def _known(schedule: str) -> tuple[str, int]:
    """Raises RequestError for a schedule that there is not."""
    if schedule not in SCHEDULES:
        raise RequestError(f"--schedule {schedule}: {one_of(schedule, SCHEDULES)}")
    return SCHEDULES[schedule]


def _gpipe(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    for kind in ("forward", "backward"):
        for number in range(microbatches):
            yield Action(rank, kind, number)


def _one_by_one(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    ahead = min(microbatches, ranks - rank)
    for number in range(ahead):
        yield Action(rank, "forward", number)
    for number in range(microbatches):
        yield Action(rank, "backward", number)
        if number + ahead < microbatches:
            yield Action(rank, "forward", number + ahead)


class _Stub:
    """Stands for a stage of torch's pipelines: the attributes that schedules read."""

    def __init__(self, index: int, count: int, rank: int, ranks: int) -> None:
        import torch

        self.stage_index, self.num_stages = index, count
        self.group_rank, self.group_size, self.group = rank, ranks, None
        self.is_first, self.is_last = index == 0, index == count - 1
        self.submod, self.device = torch.nn.Identity(), torch.device("meta")
        self.has_backward = True
        self.stage_index_to_group_rank: dict[int, int] = {}


def _actions(order: Any) -> Iterator[Action]:
    """The actions of one process, without the steps in which it does nothing."""
    for item in order:
        if item is None:
            continue
        parts = item.sub_actions or (item,)
        for position, part in enumerate(parts):
            kind = _KINDS.get(part.computation_type.value)
            if kind is not None:
                more = position + 1 < len(parts)
                yield Action(part.stage_index, kind, part.microbatch_index, together=more)


# -- actions ---------------------------------------------------------------------------------------

KINDS = ("forward", "backward", "backward_input", "backward_weight")
"""backward computes both gradients; the last two compute that of the input and of the weights."""


@dataclass(frozen=True, slots=True)
class Action:
    """One microbatch in one stage.

    together: whether it runs at the same time as the next action (forward and backward of two
    microbatches that overlap).
    """

    stage: int
    kind: str  # one of `KINDS`
    microbatch: int
    together: bool = False
