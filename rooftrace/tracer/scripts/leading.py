"""Turns of several threads: one of them leads, until another begins a turn of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from time import monotonic, sleep
from typing import Any

import torch
from torch import nn

from rooftrace.tracer.scripts.keeping import TurnKeeper
from rooftrace.tracer.scripts.turns import OpenTurn

_MOMENT = 0.001
"""Seconds between two looks at the turn of another thread."""
_PATIENCE = 20.0
"""Seconds that threads wait for the end of another's step."""


class TurnsOfThreads(TurnKeeper):
    """Lets threads make turns, one at a time."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._proves = False  # no call begins a turn
        self._endless: OpenTurn | None = None  # that others have waited for in vain

    @contextlib.contextmanager
    def leading(self, module: nn.Module | None = None) -> Iterator[bool]:
        """Inside, whether what the running thread does makes turns; no other thread's does.

        A thread takes the lead with a model that it trains, or with any in a script that trains
        none, if no other is in the middle of a turn; it waits a while for the end of that.
        """
        until = monotonic() + _PATIENCE
        while True:
            with self._stage.turn() as alone:
                if monotonic() > until:
                    self._endless = self._turn
                if not (alone and self._halfway_elsewhere(module)):
                    leads = alone and (self._stage.leads or self._takes_over(module))
                    if not leads and self._stage.is_aside:
                        self.variety.said["threads at once"] = (
                            "a thread called a model while another was halfway in a turn and "
                            "waited: such calls are not counted"
                        )
                    yield leads and not self._proves
                    return
            sleep(_MOMENT)

    def _halfway_elsewhere(self, module: nn.Module | None) -> bool:
        """Whether a thread that goes on computing is halfway in a step, so that this one waits."""
        turn = self._turn
        if self._stage.leads or turn is None or turn is self._endless or self._stage.waits:
            return False
        with torch._C.DisableTorchFunction():
            return self._may_make(module) and not self._kinds.whole(turn)

    def _may_make(self, module: nn.Module | None) -> bool:
        """Whether a call of a module, or a step, may make a turn in a thread that does not lead."""
        return module is None or not self._optimizers.known or self._optimizers.trains(module)

    def _takes_over(self, module: nn.Module | None) -> bool:
        turn = self._turn

        def first() -> None:
            if turn is not None:
                self._finish(turn)

        with torch._C.DisableTorchFunction():
            may = self._may_make(module) and (turn is None or self._is_whole(turn))
        return may and self._stage.lead(first, self.end)

    def end(self) -> None:
        """The script has ended."""
        if self._turn is not None and self._turn.calls:
            self._note_backward(self._turn)
            self._finish(self._turn)

    def _note_backward(self, turn: OpenTurn) -> None:
        """Note whether a backward has run since the last call."""
        if self._stage.recorder.here.after_backward and turn.followed < len(turn.calls):
            turn.followed = len(turn.calls)
            self._kinds.differentiated(turn)

    def _is_whole(self, turn: OpenTurn) -> bool:
        """Whether all of a turn has run, but for what follows its last call."""
        self._note_backward(turn)
        return self._kinds.whole(turn)
