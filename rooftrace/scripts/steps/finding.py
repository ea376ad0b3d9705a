"""Finding the steps of a script while it runs.

A turn is a training step, or a call without gradients.  A training step ends before the first call
of a module after every optimizer has stepped.  Each call without gradients of a module that is
trained, or in a script that trains nothing, is a separate turn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import monotonic, sleep
from typing import Any

import torch
from torch import nn

from rooftrace.scripts.steps.book import Prices
from rooftrace.scripts.steps.calls import Look, ModuleCall, Result, resized, state_of
from rooftrace.scripts.steps.keeping import Optimizers, TurnKeeper, weighs
from rooftrace.scripts.steps.recorders import ScriptRecorder
from rooftrace.scripts.steps.records import TRAINING, TurnPiece
from rooftrace.scripts.steps.watching import OpenTurn, Ops
from rooftrace.tracer.phases import stepping
from rooftrace.tracer.recording import overrides
from rooftrace.tracer.torch_private import DisableTorchFunction, get_tracing_state
from rooftrace.tracer.values import tensors_in

# -- leading ---------------------------------------------------------------------------------------
# Turns of several threads: one of them leads, until another begins a turn.


_MOMENT = 0.001
"""Seconds between two looks at the turn of another thread."""
_LOCKED = 0.005
"""Seconds between two looks at a thread that another waits for."""
_PATIENCE = 20.0
"""Seconds that threads wait for the end of another's step."""


class TurnsOfThreads(TurnKeeper):
    """Lets threads make turns, one at a time: the main one, until another takes the lead."""

    def __init__(self, recorder: ScriptRecorder, *arguments: Any) -> None:
        super().__init__(recorder, *arguments)
        self._threads, self._main = recorder.threads, threading.get_ident()
        self._looking = threading.RLock()  # of the thread that looks at turns or changes them
        self._looker: int | None = None  # that thread
        self._proves = False  # no call begins a turn
        self._endless: OpenTurn | None = None  # that others have waited for in vain
        recorder.tell_of_ends(self._leave)

    @property
    def leads(self) -> bool:
        """Whether the running thread is the one that leads."""
        return threading.get_ident() == self._threads.leader

    @contextlib.contextmanager
    def leading(self, module: nn.Module | None = None) -> Iterator[bool]:
        """Inside, whether calls of the running thread make turns; those of no other thread do.

        A thread takes the lead with a model that it trains, or with any in a script that trains
        none, if no other is in the middle of a turn; it waits a while for the end of that.
        """
        until, here = monotonic() + _PATIENCE, threading.get_ident()
        while True:
            with self._alone() as alone:
                if monotonic() > until:
                    self._endless = self._turn
                if not (alone and self._halfway_elsewhere(module)):
                    leads = alone and (self.leads or self._takes_over(module))
                    if not (leads or self.leads) and self._threads.idents.get(here) == here:
                        self.variety.said["threads at once"] = (
                            "a thread called a model while another was halfway in a turn and "
                            "waited: such calls are not counted"
                        )
                    yield leads and not self._proves
                    return
            sleep(_MOMENT)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Inside, no other thread takes the lead.

        False where another one has a call under way that waits, perhaps for this thread.
        """
        while not self._looking.acquire(timeout=_LOCKED):
            looker = self._looker
            if looker is not None and self._threads.awaits_others(looker):
                yield False
                return
        outer, self._looker = self._looker, threading.get_ident()
        try:
            yield True
        finally:
            self._looker = outer
            self._looking.release()

    def _leave(self) -> None:
        """A thread is at the end of its task."""
        with self._looking:
            if self.leads:
                self.end()
                self._threads.leader = self._main

    def _halfway_elsewhere(self, module: nn.Module | None) -> bool:
        """Whether a thread that goes on computing is halfway in a step, so that this one waits."""
        turn = self._turn
        if self.leads or turn is None or turn is self._endless:
            return False
        if self._threads.awaits_others(self._threads.leader):
            return False
        with DisableTorchFunction():
            return self._may_make(module) and not self._kinds.is_complete(turn)

    def _may_make(self, module: nn.Module | None) -> bool:
        """Whether a call of a module, or a step, may make a turn in a thread that does not lead."""
        return module is None or not self._optimizers.has_any or self._optimizers.trains(module)

    def _takes_over(self, module: nn.Module | None) -> bool:
        turn, here = self._turn, threading.get_ident()
        with DisableTorchFunction():
            may = self._may_make(module) and (turn is None or self._is_whole(turn))
        if not may or here not in self._threads.idents:  # nothing that it runs is seen
            return False
        if turn is not None:
            self._finish(turn)
        self._threads.idents[here] = self._threads.leader = here
        self._recorder.renew(record=False)
        return True

    def end(self) -> None:
        """The script has ended."""
        if self._turn is not None and self._turn.calls:
            self._note_backward(self._turn)
            self._finish(self._turn)

    def _note_backward(self, turn: OpenTurn) -> None:
        """Note whether a backward has run since the last call."""
        if self._recorder.here.after_backward and turn.followed < len(turn.calls):
            turn.followed = len(turn.calls)
            self._kinds.differentiated(turn)

    def _is_whole(self, turn: OpenTurn) -> bool:
        """Whether all of a turn has run, except code after its last call."""
        self._note_backward(turn)
        return self._kinds.is_complete(turn)


# -- finding ---------------------------------------------------------------------------------------


class Finder(TurnsOfThreads):
    """Receives the events of a script, and has the recorder record it turn by turn.

    recorder: of the run.  steps: so many turns are wanted; then `stop` is called, which raises.
    """

    def __init__(
        self,
        recorder: ScriptRecorder,
        optimizers: Optimizers,
        wanted: int | None,
        stop: Callable[[], None],
    ) -> None:
        super().__init__(recorder, optimizers)
        self._wanted, self._stop = wanted, stop
        recorder.differentiated = self.differentiated

    # -- events of the script ----------------------------------------------------------------------

    def run(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a module in the recorder that is on."""
        return self._recorder.answer(module, *args, **kwargs)

    def call(self, made: ModuleCall) -> Any:
        """A module is called from outside of any module."""
        complete = not made.begun and get_tracing_state() is None
        with overrides.untraced(), DisableTorchFunction():
            here = self._roots.on_device(made.module, made.arguments)
            predicted = self._known(made, complete) if here else None
        if not here:
            return made.run()
        if predicted is not None:
            return predicted[0]
        turn = self._turn
        assert turn is not None
        ops: Ops | None = None
        try:
            if len(turn.calls) == 1 and self._may_differ_in_length(turn, turn.calls[0]):
                output, ops = noted_call(self._recorder, made.module, made.arguments)
                self._recorder.log = turn.after
            else:
                output = made.run()
        except BaseException:
            if len(turn.calls) == 1:  # it was no turn
                self._turn = None
            raise
        with overrides.untraced(), DisableTorchFunction():
            result = Result(output, self._recorder.values)
            self._results.append(result)
        if ops is not None and result.leaves is not None:
            turn.ops = ops
            sizes = turn.calls[0].sizes
            aside = CallAside(self._recorder, made.module, made.arguments, sizes)
            self.lengths.check(turn.calls[0], ops, aside)
        return output

    def prove(self) -> None:
        """The script is at its end: turns counted by formulas of a length are checked there."""
        if self.leads:
            self._proves = True
            self.lengths.prove()
            self._proves = False

    def _known(self, made: ModuleCall, complete: bool) -> tuple[Any] | None:
        """The result of a call that need not run; else None, and the turn is ready for the call.

        complete: none of it has run yet, and torch.jit.trace does not wait for its ops.
        """
        look = made.look()
        look = (
            look if complete else dataclasses.replace(look, kind=(look.kind, "begun"), plain=False)
        )
        self._roots.meet(made.module)
        turn = self._turn_of(look, made)
        self._kinds.note(turn, made.module, self._recorder.brought_bytes)
        if not turn.recorded:
            result = self._answer(turn, look)
            if result is not None:
                turn.calls.append(look)
                return (self._recorder.given(result, made.module, made.arguments),)
            self._record_rest(turn)
        if self._accumulates(turn, look):
            if not turn.repeating:
                self._close_piece(turn)
                turn.repeating = self._recorder.entries.unread = True
            turn.repeat()
            turn.calls.append(look)
            result = self._results[-1]
            self._results.append(result)
            return (self._recorder.given(result, made.module, made.arguments),)
        turn.calls.append(look)
        self._recorder.enter_inputs(tensors_in(made.arguments))
        return None

    def _answer(self, turn: OpenTurn, look: Look) -> Result | None:
        """The result of a call in an unrecorded turn; None if it has to run."""
        if turn.by_form is not None:
            self._recorder.log = turn.after
            return None if turn.calls else turn.by_form.result
        first = turn.calls[0] if turn.calls else look
        return self._steady[self._key(turn, first)].answer(len(turn.calls), look)

    def differentiated(self) -> None:
        """A backward has run: where no optimizer says later which tensors are gradients, they are
        those that weights have now."""
        turn = self._turn
        if turn is None or not turn.recorded or not self.leads:
            return
        with DisableTorchFunction():
            if not self._optimizers.has_any:
                root = self._roots.container
                stepping.note_gradients(self._recorder, root, turn.learnt)

    def before_step(self) -> None:
        """An optimizer is about to step."""
        if self._turn is not None and self._turn.repeating:
            self._close_piece(self._turn, named=True)

    def loaded(self, seconds: float) -> None:
        """A data loader gave a batch, after so many seconds: for this turn, or for the next."""
        turn = self._turn
        self.clock.loaded(seconds)
        with DisableTorchFunction():
            goes_to = self._loaded if turn is None or self._is_whole(turn) else turn.loaded
        goes_to.add(seconds)

    def elapsed(self, prices: Prices) -> float | None:
        """Expected seconds so far of the open turn; None where none is open.

        One that is not run is where a turn like it was after as many calls, backwards and steps.
        """
        turn = self._turn
        if turn is None:
            return None
        with DisableTorchFunction():
            complete = self._is_whole(turn)
            state = len(turn.calls), turn.followed, sum(self._optimizers.steps.values())
            if turn.recorded:
                seconds = prices.total(turn.pieces)
                recorder = self._recorder
                before = turn.reached.get((state[0] - 1, state[1] - 1, state[2]))
                if turn.repeating and before is not None:  # a pass is where the last one was
                    last = turn.pieces[-1].graph
                    seconds = before + prices.total([TurnPiece(last)])
                elif not turn.repeating and recorder.has_ops:
                    seconds += self.book.part(recorder, self._roots.container, turn.learnt, prices)
                turn.reached[state] = seconds
                return seconds
        steady = self._steady[self._key(turn, turn.calls[0] if turn.calls else None)]
        part = 1.0 if complete else min(len(turn.calls) / max(len(steady.calls), 1), 1.0)
        return steady.reached.get(state, prices.total(steady.pieces) * part)

    @property
    def learnt(self) -> stepping.Learnt | None:
        """Facts learnt about the open turn; None if none is open."""
        return None if self._turn is None else self._turn.learnt

    # -- turns -------------------------------------------------------------------------------------

    def _turn_of(self, look: Look, made: ModuleCall) -> OpenTurn:
        """The turn that a call belongs to: the open one, or a new one."""
        turn = self._turn
        if turn is not None:
            self._note_backward(turn)
            self._recorder.here.after_backward = False
            brought = self._recorder.brought_bytes
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

    # -- gradient accumulation ---------------------------------------------------------------------

    def _accumulates(self, turn: OpenTurn, look: Look) -> bool:
        """Whether a call begins one more of several equal forward and backward passes of a step.

        The first two are recorded together, the third is a separate piece, and those that look
        like it are not run.
        """
        done = len(turn.calls)
        if turn.kind != TRAINING or done < 2 or not look.plain or turn.backwards != done:
            if turn.repeating:
                self._close_piece(turn, named=True)
            return False
        same = all(other.key == look.key for other in turn.calls[-2:])
        if not same:
            if turn.repeating or done > 2:
                self._close_piece(turn, named=True)
            return False
        if done == 2:
            self._close_piece(turn, named=True)
            return False
        return len(turn.pieces) > 0 and self._results[-1].reusable


# -- probing ---------------------------------------------------------------------------------------
# Calls of modules whose ops are noted, and the same call again on other sizes, aside.


def noted_call(
    recorder: ScriptRecorder, module: nn.Module, arguments: Any
) -> tuple[Any, Ops | None]:
    """The result of a call, and its ops; None for the ops if the call changes the module's state.

    arguments: those without a name, and those with one.
    """
    args, kwargs = arguments
    with DisableTorchFunction():
        state = state_of(module)
    before, log = recorder.log, []  # type: ignore[var-annotated]
    recorder.log = log
    try:
        output = recorder.answer(module, *args, **kwargs)
    finally:
        recorder.log = before
    with DisableTorchFunction():
        return output, log if state_of(module) == state else None


class CallAside:
    """A call, to be made again on tensors of other sizes, of which nothing is recorded.

    It keeps neither the module nor its arguments alive.
    """

    def __init__(
        self, recorder: ScriptRecorder, module: nn.Module, arguments: Any, sizes: Sequence[int]
    ) -> None:
        self._recorder, self._module = recorder, weakref.ref(module)
        with DisableTorchFunction():
            self._arguments = resized(arguments, sizes)
        self._trains = [inner.training for inner in module.modules()]
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._cast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")

    def __call__(self, sizes: Sequence[int]) -> Ops | None:
        """The ops of the call on these sizes; None where it cannot be made."""
        module = self._module()
        with DisableTorchFunction():
            arguments = None if self._arguments is None else resized(self._arguments, sizes)
        if module is None or arguments is None:
            return None
        inside = list(module.modules())
        trains = [inner.training for inner in inside]
        _train(inside, self._trains)
        enabled, dtype = self._cast
        try:
            with (
                self._recorder.paused(),
                torch.inference_mode(self._inference),
                torch.set_grad_enabled(self._grad),
                torch.autocast("cuda", dtype, enabled),
            ):
                return noted_call(self._recorder, module, arguments)[1]
        except Exception:  # whatever the module raises at these sizes
            return None
        finally:
            _train(inside, trains)


def _train(modules: Sequence[nn.Module], flags: Sequence[bool]) -> None:
    for module, flag in zip(modules, flags, strict=False):
        module.training = flag
