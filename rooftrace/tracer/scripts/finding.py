"""Finding the steps of a script while it runs.

A turn is a training step, or a call without gradients.  A training step ends before the first call
of a module after every optimizer has stepped.  Each call without gradients of a module that is
trained, or in a script that trains nothing, is a turn of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from rooftrace.tracer.phases import steps
from rooftrace.tracer.scripts.book import Book
from rooftrace.tracer.scripts.calls import Look, Result, look_of, says
from rooftrace.tracer.scripts.clocks import HostClock
from rooftrace.tracer.scripts.kinds import Kinds
from rooftrace.tracer.scripts.optimizers import Optimizers
from rooftrace.tracer.scripts.presenting import Shapes
from rooftrace.tracer.scripts.recorders import ScriptRecorder
from rooftrace.tracer.scripts.records import TRAINING, TurnPiece, Turns
from rooftrace.tracer.scripts.roots import Roots
from rooftrace.tracer.scripts.stage import RecorderStage
from rooftrace.tracer.scripts.turns import LoadedBatches, OpenTurn, SteadyTurns, Variety
from rooftrace.tracer.tensors import tensors_in

_ALIKE = 2
"""So many equal turns in a row, and those that look like them are not run again."""
_LONG = 1000
"""Ops that a recorder may hold of turns that need no graph, before another takes its place."""


class Finder:
    """Is told what a script does, and has the recorder record it turn by turn.

    stage: has the recorder.  steps: so many turns are wanted; then `stop` is called, which raises.
    """

    def __init__(
        self,
        stage: RecorderStage,
        shapes: Shapes,
        optimizers: Optimizers,
        wanted: int | None,
        stop: Callable[[], None],
    ) -> None:
        self.book = Book()
        self.clock: HostClock = HostClock()
        self._stage, self._optimizers = stage, optimizers
        self._wanted, self._stop = wanted, stop
        self._kinds, self._roots = Kinds(optimizers), Roots(shapes)
        self._loaded = LoadedBatches()  # for the next turn
        self._turn: OpenTurn | None = None
        self._steady: dict[Any, SteadyTurns] = {}
        self._unread = False  # what the recorder has is of turns that need no graph
        self._results: list[Result] = []  # of the calls of the open turn
        self.variety = Variety()
        self.trained = self.called = 0  # training steps, and calls without gradients, so far

    # -- what the script does ----------------------------------------------------------------------

    def run(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a module in the recorder that is on."""
        return self._stage.recorder.answer(module, *args, **kwargs)

    def call(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A module is called from outside of any module."""
        if torch._C._current_autograd_node() is not None:
            return self.run(module, args, kwargs)
        with torch._C.DisableTorchFunction():
            here = self._roots.on_device(module, (args, kwargs))
            known = self._known(module, args, kwargs) if here else None
        if not here:
            return self.run(module, args, kwargs)
        if known is not None:
            return known[0]
        output = self.run(module, args, kwargs)
        with torch._C.DisableTorchFunction():
            self._results.append(Result(output, self._stage.recorder.values))
        return output

    def _known(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any] | None:
        """What the call returns, where it need not run; else None, and the turn is ready for it."""
        look = look_of(module, args, kwargs)
        self._roots.meet(module)
        turn = self._turn_of(look, module, says(module, args, kwargs))
        self._kinds.note(turn, module, self._stage.recorder.brought_bytes)
        if not turn.recorded:
            first = turn.calls[0] if turn.calls else look
            result = self._steady[_key(turn.kind, first)].answer(len(turn.calls), look)
            if result is not None:
                turn.calls.append(look)
                return (result.again(module, self._stage.recorder.values, (args, kwargs)),)
            self._record_rest(turn)
        if self._accumulates(turn, look):
            if not turn.repeating:
                self._close_piece(turn)
                turn.repeating = True
            turn.repeat()
            turn.calls.append(look)
            result = self._results[-1]
            self._results.append(result)
            return (result.again(module, self._stage.recorder.values, (args, kwargs)),)
        turn.calls.append(look)
        self._stage.recorder.enter_inputs(tensors_in((args, kwargs)))
        return None

    def before_step(self) -> None:
        """An optimizer is about to step."""
        if self._turn is not None and self._turn.repeating:
            self._next_piece(self._turn)

    def loaded(self, seconds: float) -> None:
        """A data loader gave a batch, after so many seconds: for this turn, or for the next."""
        turn = self._turn
        with torch._C.DisableTorchFunction():
            goes_to = self._loaded if turn is None or self._whole(turn) else turn.loaded
        goes_to.add(seconds, awaited=turn is not None)

    def end(self) -> None:
        """The script has ended."""
        if self._turn is not None:
            self._finish(self._turn)

    def settle(self) -> float:
        """End the open turn if all of it has run; returns how far it is, by its ops, up to 1."""
        turn = self._turn
        if turn is None:
            return 0.0
        with torch._C.DisableTorchFunction():
            if self._whole(turn):
                self._finish(turn)
                return 0.0
        steady = self._steady.get(TRAINING)
        calls = len(steady.calls) if steady is not None else 0
        return min(len(turn.calls) / calls, 1.0) if calls else 0.0

    @property
    def learnt(self) -> steps.Learnt | None:
        """What is known of the open turn; None where none is open."""
        return None if self._turn is None else self._turn.learnt

    # -- turns -------------------------------------------------------------------------------------

    def _turn_of(self, look: Look, module: nn.Module, label: str) -> OpenTurn:
        """The turn that a call belongs to: the open one, or a new one."""
        turn = self._turn
        if turn is not None:
            brought = self._stage.recorder.brought_bytes
            if self._kinds.goes_on(turn, module, self._optimizers.have_stepped(), brought):
                turn.backwards += self._stage.recorder.after_backward
                return turn
            self._finish(turn)
        kind = self._kinds.of(module)
        if self._has_run_enough(kind):
            self._stop()
        return self._begin(kind, look, label)

    def _has_run_enough(self, kind: str) -> bool:
        """Whether the wanted steps have run: training steps, or calls where nothing trains."""
        if self._wanted is None:
            return False
        done = self.trained if kind == TRAINING else self.called
        return done >= self._wanted and (kind == TRAINING or not self._optimizers.known)

    def _whole(self, turn: OpenTurn) -> bool:
        """Whether all of a turn has run, but for what follows its last call."""
        return turn.kind != TRAINING or self._optimizers.have_stepped()

    def _begin(self, kind: str, look: Look, label: str) -> OpenTurn:
        key = _key(kind, look)
        steady = self._steady.get(key)
        known = steady is not None and steady.alike >= _ALIKE and look.plain
        known = known and kind not in self.variety.kinds
        turn = self._turn = OpenTurn(kind, label, steps.Learnt(), recorded=not known)
        turn.loaded, self._loaded = self._loaded, LoadedBatches()
        self.clock.began()
        self._optimizers.steps.clear()
        self._results = []
        if turn.recorded or not self._unread or len(self._stage.recorder.graph.nodes) > _LONG:
            self.book.discard(self._stage.change(self._name if turn.recorded else None))
        self._unread = not turn.recorded
        return turn

    def _name(self, recorder: ScriptRecorder) -> None:
        """A recorder knows the modules, the states of optimizers, and what else there is."""
        steps.enter_modules(recorder, self._roots.container)
        self._optimizers.enter(recorder)
        recorder.stand_in(self._stage.recorder)

    def _finish(self, turn: OpenTurn) -> None:
        self._turn = None
        key = _key(turn.kind, turn.calls[0])
        steady = self._steady.get(key)
        if not turn.recorded:
            if steady is not None and steady.stretch is not None:
                self._add(turn, steady.stretch, run=0)
            else:
                self.variety.note(turn.kind, self.called)
            return
        self._close_piece(turn)
        calls = tuple(look.key for look in turn.calls)
        plain = all(look.plain for look in turn.calls) and all(r.known for r in self._results)
        pieces = tuple(turn.pieces)
        stretch = Turns(
            kind=turn.kind,
            pieces=pieces,
            brought=turn.brought,
            taken=turn.taken,
            optimizers=tuple(dict.fromkeys(turn.learnt.optimizers)),
            label=turn.label,
            passes=len(calls) if turn.is_accumulated else 1,
        )
        self._add(turn, stretch, run=1)
        before = steady if steady and (steady.pieces, steady.calls) == (pieces, calls) else None
        alike = (1 + (before.alike if before else 0)) * plain
        self._steady[key] = SteadyTurns(pieces, calls, alike, list(self._results), stretch)

    def _add(self, turn: OpenTurn, stretch: Turns, run: int) -> None:
        self.clock.ended(stretch.pieces, turn.loaded.awaited)
        if turn.kind == TRAINING:
            self.trained += 1
        else:
            self.called += 1
        self.book.add(
            replace(
                stretch, run=run, turns=1, loading=turn.loaded.seconds, batches=turn.loaded.batches
            )
        )

    # -- turns that are like others ----------------------------------------------------------------

    def _record_rest(self, turn: OpenTurn) -> None:
        """A turn is not like the turns before: the rest of it is recorded."""
        turn.recorded = True
        if turn.calls:
            self.variety.note(turn.kind, self.trained if turn.kind == TRAINING else self.called)
        self.book.discard(self._stage.change(self._name))

    # -- gradient accumulation -------------------------------------------------------------------

    def _accumulates(self, turn: OpenTurn, look: Look) -> bool:
        """Whether a call begins one more of several equal forward and backward passes of a step.

        The first two are recorded together, the third is a piece of its own, and those that look
        like it are not run.
        """
        done = len(turn.calls)
        if turn.kind != TRAINING or done < 2 or not look.plain or turn.backwards != done:
            if turn.repeating:
                self._next_piece(turn)
            return False
        same = all(other.key == look.key for other in turn.calls[-2:])
        if not same:
            if turn.repeating or done > 2:
                self._next_piece(turn)
            return False
        if done == 2:
            self._next_piece(turn)
            return False
        return len(turn.pieces) > 0 and self._results[-1].known

    def _next_piece(self, turn: OpenTurn) -> None:
        self._close_piece(turn, self._name)

    def _close_piece(
        self, turn: OpenTurn, prepare: Callable[[ScriptRecorder], None] | None = None
    ) -> None:
        """What was recorded becomes a piece; what was taken to be like the last one does not."""
        root = self._roots.container
        steps.note_gradients(self._stage.recorder, root, turn.learnt)
        old = self._stage.change(prepare)
        turn.brought += old.brought_bytes
        turn.taken += old.taken_bytes
        if turn.repeating:
            turn.repeating = False
            self.book.discard(old)
        else:
            turn.pieces.append(TurnPiece(self.book.graph(old, root, turn.learnt)))
        turn.learnt.gradients.clear()  # the next recorder numbers storages anew


def _key(kind: str, look: Look) -> Any:
    """By what turns are alike: training steps are one after another, calls by how they look."""
    return TRAINING if kind == TRAINING else look.key
