"""Finding the steps of a script while it runs.

A turn is a training step, or a call without gradients.  A training step ends before the first call
of a module after every optimizer has stepped.  Each call without gradients of a module that is
trained, or in a script that trains nothing, is a turn of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from rooftrace.tracer.phases import stepping
from rooftrace.tracer.scripts.calls import Look, Result, first_shape, look_of, says
from rooftrace.tracer.scripts.keeping import TurnKeeper
from rooftrace.tracer.scripts.optimizers import Optimizers
from rooftrace.tracer.scripts.presenting import Shapes
from rooftrace.tracer.scripts.records import TRAINING
from rooftrace.tracer.scripts.stage import RecorderStage
from rooftrace.tracer.scripts.turns import OpenTurn
from rooftrace.tracer.tensors import tensors_in


class Finder(TurnKeeper):
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
        return self._stage.recorder.answer(module, *args, **kwargs)

    def leads(self, module: nn.Module | None = None) -> bool:
        """Whether what the running thread does makes turns.

        A thread for which the main one waits leads from the first module on that it trains, or
        that it calls in a script that trains none.
        """
        if self._stage.leads:
            return True
        if self._turn is not None or self.trained or self.called:
            return False
        with torch._C.DisableTorchFunction():
            trains = module is None or self._optimizers.trains(module)
            may = trains or not self._optimizers.known
        return may and self._stage.lead(self.end)

    def call(
        self,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        rest: Callable[[], Any] | None = None,
    ) -> Any:
        """A module is called from outside of any module.  rest: what to run of it, where it has
        begun."""
        run = rest or partial(self.run, module, args, kwargs)
        if torch._C._current_autograd_node() is not None:
            return run()
        with torch._C.DisableTorchFunction():
            here = self._roots.on_device(module, (args, kwargs))
            known = self._known(module, args, kwargs, rest is None) if here else None
        if not here:
            return run()
        if known is not None:
            return known[0]
        output = run()
        with torch._C.DisableTorchFunction():
            self._results.append(Result(output, self._stage.recorder.values))
        return output

    def _known(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], whole: bool
    ) -> tuple[Any] | None:
        """What the call returns, where it need not run; else None, and the turn is ready for it.

        whole: none of it has run yet.
        """
        look = look_of(module, args, kwargs)
        look = look if whole else Look((look.key, "begun"), plain=False)
        self._roots.meet(module)
        turn = self._turn_of(look, module, args, kwargs)
        self._kinds.note(turn, module, self._stage.recorder.brought_bytes)
        if not turn.recorded:
            first = turn.calls[0] if turn.calls else look
            result = self._steady[self._key(turn, first)].answer(len(turn.calls), look)
            if result is not None:
                turn.calls.append(look)
                return (self._again(result, module, (args, kwargs)),)
            self._record_rest(turn)
        if self._accumulates(turn, look):
            if not turn.repeating:
                self._close_piece(turn)
                turn.repeating = True
            turn.repeat()
            turn.calls.append(look)
            result = self._results[-1]
            self._results.append(result)
            return (self._again(result, module, (args, kwargs)),)
        turn.calls.append(look)
        self._stage.recorder.enter_inputs(tensors_in((args, kwargs)))
        return None

    def _again(self, result: Result, module: nn.Module, arguments: Any) -> Any:
        """What a call returns that is not run: no op makes it, and it costs what its like did."""
        output = result.again(module, self._stage.recorder.values, arguments)
        self._stage.recorder.stand(tensors_in(output))
        return output

    def before_step(self) -> None:
        """An optimizer is about to step."""
        if self._turn is not None and self._turn.repeating:
            self._next_piece(self._turn)

    def loaded(self, seconds: float) -> None:
        """A data loader gave a batch, after so many seconds: for this turn, or for the next."""
        turn = self._turn
        with torch._C.DisableTorchFunction():
            goes_to = self._loaded if turn is None or self._is_whole(turn) else turn.loaded
        goes_to.add(seconds, awaited=turn is not None)

    def end(self) -> None:
        """The script has ended."""
        if self._turn is not None and self._turn.calls:  # its first call has not failed
            self._note_backward(self._turn)
            self._finish(self._turn)

    def settle(self) -> float:
        """End the open turn if all of it has run; returns how far it is, by its ops, up to 1."""
        turn = self._turn
        if turn is None:
            return 0.0
        with torch._C.DisableTorchFunction():
            if self._is_whole(turn):
                self._finish(turn)
                return 0.0
        steady = self._steady.get(TRAINING)
        calls = len(steady.calls) if steady is not None else 0
        return min(len(turn.calls) / calls, 1.0) if calls else 0.0

    @property
    def learnt(self) -> stepping.Learnt | None:
        """What is known of the open turn; None where none is open."""
        return None if self._turn is None else self._turn.learnt

    # -- turns -------------------------------------------------------------------------------------

    def _turn_of(
        self, look: Look, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> OpenTurn:
        """The turn that a call belongs to: the open one, or a new one."""
        turn = self._turn
        if turn is not None:
            self._note_backward(turn)
            self._stage.recorder.after_backward = False
            brought = self._stage.recorder.brought_bytes
            if self._kinds.goes_on(turn, module, (args, kwargs), brought):
                return turn
            self._finish(turn)
        kind = self._kinds.of(module)
        if self._has_run_enough(kind):
            self._stop()
        turn = OpenTurn(kind, says(module, args, kwargs), first_shape(args, kwargs))
        return self._begin(turn, look)

    def _has_run_enough(self, kind: str) -> bool:
        """Whether the wanted steps have run: training steps, or calls where nothing trains."""
        if self._wanted is None:
            return False
        done = self.trained if kind == TRAINING else self.called
        return done >= self._wanted and (kind == TRAINING or not self._kinds.train)

    def _note_backward(self, turn: OpenTurn) -> None:
        """Note whether a backward has run since the last call."""
        if self._stage.recorder.after_backward and turn.followed < len(turn.calls):
            turn.followed = len(turn.calls)
            self._kinds.differentiated(turn)

    def _is_whole(self, turn: OpenTurn) -> bool:
        """Whether all of a turn has run, but for what follows its last call."""
        self._note_backward(turn)
        return self._kinds.whole(turn)

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
