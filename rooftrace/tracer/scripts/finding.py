"""Finding the steps of a script while it runs.

A turn is a training step, or a call without gradients.  A training step ends before the first call
of a module after every optimizer has stepped.  Each call without gradients of a module that is
trained, or in a script that trains nothing, is a turn of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rooftrace.tracer.patches import contexts
from rooftrace.tracer.phases import stepping
from rooftrace.tracer.scripts.calls import Look, ModuleCall, Result
from rooftrace.tracer.scripts.clocks import Prices
from rooftrace.tracer.scripts.kinds import weighs
from rooftrace.tracer.scripts.leading import TurnsOfThreads
from rooftrace.tracer.scripts.lengths import Ops
from rooftrace.tracer.scripts.optimizers import Optimizers
from rooftrace.tracer.scripts.presenting import Shapes
from rooftrace.tracer.scripts.probing import CallAside, noted_call
from rooftrace.tracer.scripts.records import TRAINING, TurnPiece
from rooftrace.tracer.scripts.stage import RecorderStage
from rooftrace.tracer.scripts.turns import OpenTurn
from rooftrace.tracer.tensors import tensors_in


class Finder(TurnsOfThreads):
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
        super().__init__(stage, shapes, optimizers)
        self._wanted, self._stop = wanted, stop

    # -- what the script does ----------------------------------------------------------------------

    def run(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a module in the recorder that is on."""
        return self._stage.here.answer(module, *args, **kwargs)

    def call(self, made: ModuleCall) -> Any:
        """A module is called from outside of any module."""
        whole = not made.begun and torch._C._get_tracing_state() is None
        with contexts.untraced(), torch._C.DisableTorchFunction():
            here = self._roots.on_device(made.module, made.arguments)
            known = self._known(made, whole) if here else None
        if not here:
            return made.run()
        if known is not None:
            return known[0]
        turn = self._turn
        assert turn is not None
        ops: Ops | None = None
        try:
            if len(turn.calls) == 1 and self._may_differ_in_length(turn, turn.calls[0]):
                output, ops = noted_call(self._stage, made.module, made.arguments)
                self._stage.recorder.log = turn.after
            else:
                output = made.run()
        except BaseException:
            if len(turn.calls) == 1:  # it was no turn
                self._turn = None
            raise
        with contexts.untraced(), torch._C.DisableTorchFunction():
            result = Result(output, self._stage.recorder.values)
            self._results.append(result)
        if ops is not None and result.leaves is not None:
            turn.ops = ops
            sizes = turn.calls[0].sizes
            aside = CallAside(self._stage, made.module, made.arguments, sizes)
            self.lengths.check(turn.calls[0], ops, aside)
        return output

    def prove(self) -> None:
        """The script is at its end: what was counted by formulas of a length is checked there."""
        if self._stage.leads:
            self._proves = True
            self.lengths.prove()
            self._proves = False

    def _known(self, made: ModuleCall, whole: bool) -> tuple[Any] | None:
        """What the call returns, where it need not run; else None, and the turn is ready for it.

        whole: none of it has run yet, and torch.jit.trace does not wait for its ops.
        """
        look = made.look()
        look = look if whole else dataclasses.replace(look, kind=(look.kind, "begun"), plain=False)
        self._roots.meet(made.module)
        turn = self._turn_of(look, made)
        self._kinds.note(turn, made.module, self._stage.recorder.brought_bytes)
        if not turn.recorded:
            result = self._answer(turn, look)
            if result is not None:
                turn.calls.append(look)
                return (self._stage.recorder.given(result, made.module, made.arguments),)
            self._record_rest(turn)
        if self._accumulates(turn, look):
            if not turn.repeating:
                self._close_piece(turn)
                turn.repeating = self._stage.recorder.entries.unread = True
            turn.repeat()
            turn.calls.append(look)
            result = self._results[-1]
            self._results.append(result)
            return (self._stage.recorder.given(result, made.module, made.arguments),)
        turn.calls.append(look)
        self._stage.recorder.enter_inputs(tensors_in(made.arguments))
        return None

    def _answer(self, turn: OpenTurn, look: Look) -> Result | None:
        """What a call of a turn that is not recorded gives; None where it has to run."""
        if turn.by_form is not None:
            self._stage.recorder.log = turn.after
            return None if turn.calls else turn.by_form.result
        first = turn.calls[0] if turn.calls else look
        return self._steady[self._key(turn, first)].answer(len(turn.calls), look)

    def differentiated(self) -> None:
        """A backward has run: where no optimizer says later which tensors are gradients, they are
        those that weights have now."""
        turn = self._turn
        if turn is None or not turn.recorded or not self._stage.leads:
            return
        with torch._C.DisableTorchFunction():
            if not self._optimizers.known:
                root = self._roots.container
                stepping.note_gradients(self._stage.recorder, root, turn.learnt)

    def before_step(self) -> None:
        """An optimizer is about to step."""
        if self._turn is not None and self._turn.repeating:
            self._next_piece(self._turn)

    def loaded(self, seconds: float) -> None:
        """A data loader gave a batch, after so many seconds: for this turn, or for the next."""
        turn = self._turn
        self.clock.loaded(seconds)
        with torch._C.DisableTorchFunction():
            goes_to = self._loaded if turn is None or self._is_whole(turn) else turn.loaded
        goes_to.add(seconds)

    def elapsed(self, prices: Prices) -> float | None:
        """Expected seconds of what has run of the open turn; None where none is open.

        One that is not run is where a turn like it was after as many calls, backwards and steps.
        """
        turn = self._turn
        if turn is None:
            return None
        with torch._C.DisableTorchFunction():
            whole = self._is_whole(turn)
            place = len(turn.calls), turn.followed, sum(self._optimizers.steps.values())
            if turn.recorded:
                seconds = prices.total(turn.pieces)
                recorder = self._stage.recorder
                before = turn.reached.get((place[0] - 1, place[1] - 1, place[2]))
                if turn.repeating and before is not None:  # a pass is where the last one was
                    last = turn.pieces[-1].graph
                    seconds = before + prices.total([TurnPiece(last)])
                elif not turn.repeating and recorder.has_ops:
                    seconds += self.book.part(recorder, self._roots.container, turn.learnt, prices)
                turn.reached[place] = seconds
                return seconds
        steady = self._steady[self._key(turn, turn.calls[0] if turn.calls else None)]
        part = 1.0 if whole else min(len(turn.calls) / max(len(steady.calls), 1), 1.0)
        return steady.reached.get(place, prices.total(steady.pieces) * part)

    @property
    def learnt(self) -> stepping.Learnt | None:
        """What is known of the open turn; None where none is open."""
        return None if self._turn is None else self._turn.learnt

    # -- turns -------------------------------------------------------------------------------------

    def _turn_of(self, look: Look, made: ModuleCall) -> OpenTurn:
        """The turn that a call belongs to: the open one, or a new one."""
        turn = self._turn
        if turn is not None:
            self._note_backward(turn)
            self._stage.recorder.here.after_backward = False
            brought = self._stage.recorder.brought_bytes
            if not self._is_counted(turn) and self._kinds.goes_on(
                turn, made.module, made.arguments, brought
            ):
                if turn.light and weighs(made.module):
                    self._label(turn, made)
                return turn
            self._finish(turn)
        kind = self._kinds.of(made.module)
        if self._has_run_enough(kind):
            self._stop()
        turn = OpenTurn(kind, "")
        self._label(turn, made)
        return self._begin(turn, look)

    def _label(self, turn: OpenTurn, made: ModuleCall) -> None:
        """A turn is called by its first module, or by its first one with weights."""
        turn.label, turn.shape = str(made), made.shape
        turn.light = not weighs(made.module)

    def _is_counted(self, turn: OpenTurn) -> bool:
        """Whether a call that need not run has all that the ones before it had: it is over."""
        if turn.recorded or turn.kind == TRAINING or turn.by_form is not None or not turn.calls:
            return False
        return len(turn.calls) == len(self._steady[self._key(turn, turn.calls[0])].calls)

    def _has_run_enough(self, kind: str) -> bool:
        """Whether the wanted steps have run: training steps, or calls where nothing trains."""
        if self._wanted is None:
            return False
        done = self.trained if kind == TRAINING else self.called
        return done >= self._wanted and (kind == TRAINING or not self._kinds.train)

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
