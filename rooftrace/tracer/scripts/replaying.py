"""CUDA graphs of a script: what a capture runs is no turn; a replay is one, or a part of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any, Literal

import torch

from rooftrace.tracer.scripts.boundaries import BoundaryFinder
from rooftrace.tracer.scripts.calls import Look, ModuleCall
from rooftrace.tracer.scripts.records import INFERENCE, TRAINING
from rooftrace.tracer.scripts.turns import OpenTurn
from rooftrace.tracer.tape import META_KEY, Recorded

_LABEL = "CUDAGraph.replay()"


class GraphFinder(BoundaryFinder):
    """A finder that is told of CUDA graphs, too.

    Calls during a capture run, whatever they look like, and are part of no turn.
    """

    _before: Counter[int] | None = None  # steps of optimizers before the capture that runs
    _seen = 0  # ops that were recorded before the replay that runs
    _replays = False  # a replay runs: modules that ops of it call are parts of it

    def told(self, event: Literal["capture", "captured", "replay", "replayed"]) -> None:
        """A capture or a replay begins, or has ended."""
        with torch._C.DisableTorchFunction():
            if event == "capture":
                self._end_whole()
                self._before = Counter(self._optimizers.steps)
                self._aside()
            elif event == "captured":
                self._aside()
                self._optimizers.steps, self._before = self._before or Counter(), None
            elif self._before is None and event == "replay":
                self._replay()
                self._replays = True
            elif self._before is None:
                self._replays = False
                self._replayed(self._replayed_steps())

    def call(self, made: ModuleCall) -> Any:
        """A module is called from outside of any module."""
        if self._before is not None or self._replays:
            return made.run()
        return super().call(made)

    def _stepped_here(self) -> None:
        if self._before is None:
            super()._stepped_here()

    def _end_whole(self) -> None:
        turn = self._turn
        if turn is not None and self._is_whole(turn):
            self._finish(turn)

    def _aside(self) -> None:
        """Outside of turns, what was recorded is dropped."""
        if self._turn is None:
            self.book.discard(self._stage.change(self._name))

    def _replay(self) -> None:
        """A graph is about to be replayed: a turn of its own, or a part of the open one."""
        self._end_whole()
        look, turn = Look(_LABEL, plain=False), self._turn
        if turn is None:
            kind = TRAINING if self._optimizers.known else INFERENCE
            if self._has_run_enough(kind):
                self._stop()
            turn = self._begin(OpenTurn(kind, _LABEL), look)
        elif not turn.recorded:
            self._record_rest(turn)
        turn.calls.append(look)
        self._seen = len(self._stage.recorder.graph.nodes)

    def _replayed_steps(self) -> set[str]:
        """The classes of the optimizers whose ops were replayed."""
        names = set()
        for place, node in enumerate(self._stage.recorder.graph.nodes):
            noted = node.meta.get(META_KEY)
            if place < self._seen or not isinstance(noted, Recorded):
                continue
            if noted.origin.part == "optimizer":
                names.add(noted.origin.function)
        return names

    def _replayed(self, classes: Collection[str]) -> None:
        """A replay has ended, in which optimizers of these classes have stepped."""
        for key, name in self._optimizers.names().items():
            if name in classes:
                self._optimizers.steps[key] += 1
                if self._turn is not None:
                    self._turn.learnt.optimizers.append(name.lower())
