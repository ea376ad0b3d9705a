"""Turns of a script, opened and kept in the book by kind, and the optimizers that step."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from rooftrace.scripts.steps.book import Book, HostClock
from rooftrace.scripts.steps.calls import Look, Result, Roots, is_there
from rooftrace.scripts.steps.recorders import ScriptRecorder
from rooftrace.scripts.steps.records import INFERENCE, TRAINING, TurnPiece, Turns
from rooftrace.scripts.steps.watching import (
    LengthForms,
    LoadedBatches,
    OpenTurn,
    Seen,
    SteadyTurns,
    Variety,
    methods_around,
)
from rooftrace.tracer.phases import stepping, steps
from rooftrace.tracer.recording import original_of, put
from rooftrace.tracer.torch_private import DisableTorchFunction
from rooftrace.tracer.values import tensors_in

# -- kinds -----------------------------------------------------------------------------------------
# Which turn a call of a module belongs to: a training step, or a separate turn.


class Kinds:
    """Tells training steps from calls without gradients, by the optimizers that there are.

    Without any, a script may still train by hand: a call that a backward follows is a step then,
    and ends with that backward.

    A model that nothing trains may help to train another, as a teacher does, or be tried by itself,
    as an average of weights is.  It is tried if it is called again on new data of the host and no
    call with gradients came between.
    """

    def __init__(self, optimizers: Optimizers) -> None:
        self._optimizers = optimizers
        self._tried: set[int] = set()  # models that nothing trains and that are called alone
        self._by_hand = False  # a backward ran, and there is no optimizer

    @property
    def train(self) -> bool:
        """Whether the script has trained something."""
        return self._by_hand or self._optimizers.has_any

    def of(self, module: nn.Module) -> str:
        """The kind of the turn that a call of a module begins."""
        trains = self._optimizers.has_any
        if not trains and self._by_hand and torch.is_grad_enabled():
            return TRAINING
        if not trains or not torch.is_grad_enabled():
            if not trains or torch.is_inference_mode_enabled() or id(module) in self._tried:
                return INFERENCE
            if self._optimizers.trains(module) or not weighs(module):
                return INFERENCE
        return TRAINING

    def differentiated(self, turn: OpenTurn) -> None:
        """A backward has run in a turn, which makes it a step if there is no optimizer."""
        turn.backwards += 1
        if not self._optimizers.has_any:
            self._by_hand = True
            turn.kind = TRAINING

    def is_complete(self, turn: OpenTurn) -> bool:
        """Whether all of a turn has run, except code after its last call."""
        if turn.kind != TRAINING:
            return True
        if self._by_hand and not self._optimizers.has_any:
            return turn.backwards > 0
        return self._optimizers.have_stepped()

    def goes_on(self, turn: OpenTurn, module: nn.Module, arguments: Any, brought: int) -> bool:
        """Whether a call belongs to the open turn; if not, the kind of that turn may change.

        brought: bytes from the host so far.
        """
        if not torch.is_grad_enabled() and not weighs(module):
            # A loss or a score of the results, if no other method of a model begins with it.
            called = id(module) in turn.modules and turn.methods
            return not called or bool(turn.methods & methods_around())
        if turn.kind == INFERENCE and id(module) not in turn.modules:
            alone = not (self.train and torch.is_grad_enabled())
            if alone and turn.methods & methods_around():
                return True  # one method calls both, as `generate` does that runs part by part
        if turn.kind == INFERENCE and not self.train and id(module) not in turn.modules:
            # Another part of a model, which may yet be trained by hand.
            return any(tensor.grad_fn is not None for tensor in tensors_in(arguments))
        if self.is_complete(turn):
            return False
        if turn.helps is None:
            return True
        if not torch.is_grad_enabled() and self.of(module) == INFERENCE:
            turn.kind = INFERENCE
        elif id(module) in turn.helps and brought != turn.had:
            self._tried |= turn.helps
            turn.kind = INFERENCE
        return turn.kind == TRAINING

    def settle(self, turn: OpenTurn) -> None:
        """A turn has ended: it was a training step if a backward ran or an optimizer has stepped.

        One that has weights only while it steps counts from its first step on.
        """
        stepped = turn.helps is None and self._optimizers.have_stepped()
        if turn.backwards or stepped:
            turn.kind = TRAINING

    def note(self, turn: OpenTurn, module: nn.Module, brought: int) -> None:
        """A call belongs to a turn."""
        turn.had = brought
        turn.modules.add(id(module))
        if turn.kind == INFERENCE and not turn.methods:
            turn.methods = methods_around()
        if torch.is_grad_enabled():
            turn.helps = None
        elif turn.helps is not None and weighs(module):
            turn.helps.add(id(module))


def weighs(module: nn.Module) -> bool:
    """Whether a module has weights."""
    return next(module.parameters(), None) is not None


# -- optimizers ------------------------------------------------------------------------------------

_WAITS_FOR_OTHERS = 8
"""An optimizer may step so often in one training step while another has not stepped at all."""


class Optimizers:
    """The optimizers of a run that step on tensors of the device, each by its first weight.

    there: whether a tensor is on the device.  No turn waits for the step of an optimizer that
    another thread steps, nor for that of an idle one until it steps again: that was made after
    others had stepped in a turn, or that has not stepped while another one did many times, or when
    one stepped for the first time that was made after it had: another model is trained now.
    """

    def __init__(self, on_device: Callable[[Tensor], bool] = is_there) -> None:
        self._there = on_device
        self._made: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._last: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._idle: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._late: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # made after others had stepped
        self._threads: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # theirs
        self.steps: Counter[int] = Counter()  # of the open turn, by the identity of a weight

    @property
    def has_any(self) -> bool:
        """Whether there are any."""
        return bool(self.required())

    def required(self) -> set[int]:
        """Those that have weights of the device to step on."""
        keys = (self._key(optimizer) for optimizer in list(self._made))
        return {key for key in keys if key is not None}

    def have_stepped(self) -> bool:
        """Whether all that the open turn waits for have stepped in it."""
        if not self.steps:
            return False
        keyed = [(o, key) for o in list(self._made) if (key := self._key(o)) is not None]
        threads = {None, *(self._threads.get(o) for o, key in keyed if key in self.steps)}
        awake = [key for o, key in keyed if o not in self._idle and self._threads.get(o) in threads]
        if self.steps.keys() >= set(awake):
            return True
        if max(self.steps.values()) < _WAITS_FOR_OTHERS:
            return False
        self._idle.update(o for o, key in keyed if key not in self.steps)
        return True

    def names(self) -> dict[int, str]:
        """The class of each of those, by the identity of its weight."""
        made = [(self._key(optimizer), type(optimizer).__name__) for optimizer in list(self._made)]
        return {key: name for key, name in made if key is not None}

    def enter(self, tape: ScriptRecorder) -> None:
        """The states of all of them are on the device, also where nothing reads them."""
        for each in list(self._made):
            if self._key(each) is not None:
                stepping.enter_states(tape, each)

    def trains(self, module: nn.Module) -> bool:
        """Whether one of them steps on a weight of a module."""
        weights = {id(p) for p in module.parameters()}
        return any(
            id(p) in weights
            for o in list(self._made)
            for group in _groups(o)
            for p in group["params"]
        )

    def note_step(self, optimizer: Optimizer) -> None:
        """One of them has stepped."""
        self._made.add(optimizer)
        key = self._key(optimizer)
        if key is not None:
            self.steps[key] += 1
            if optimizer in self._late and optimizer not in self._last:
                former = list(self._last)
                self._idle.update(o for o in former if self._key(o) not in self.steps)
            self._last[optimizer] = key
            self._threads[optimizer] = threading.get_ident()
            self._idle.discard(optimizer)

    def meet(self) -> None:
        """From here on new optimizers are registered."""
        made = original_of(Optimizer, "__init__")

        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            made(optimizer, *args, **kwargs)
            self._made.add(optimizer)
            if self._last:
                self._late.add(optimizer)
            if self.steps:
                self._idle.add(optimizer)
            if threading.current_thread() is not threading.main_thread():
                self._threads[optimizer] = threading.get_ident()

        put(Optimizer, {"__init__": init})

    def _key(self, optimizer: Any) -> int | None:
        """The identity of an optimizer's first weight on the device; None where it has none.

        One that has weights only while it steps counts by its last.
        """
        weights = [weight for group in _groups(optimizer) for weight in group["params"]]
        trained = (w for w in weights if self._there(w) and w.requires_grad)
        first = next(trained, None)
        if first is not None:
            return id(first)
        return None if weights else self._last.get(optimizer)

    def watch(
        self,
        recorder: ScriptRecorder,
        before: Callable[[], None],
        after: Callable[[], None],
        learnt: Callable[[], stepping.Learnt | None],
    ) -> None:
        """From here on ops of optimizers are the optimizer part of a step.

        before, after: are called before and after each step.  learnt: returns the state of the open
        turn.
        """

        def begins(optimizer: Optimizer, closure: bool) -> None:
            with DisableTorchFunction():
                before()
                stepping.enter_states(recorder, optimizer)
                if (now := learnt()) is not None:  # the script may drop the gradients next
                    for weight in (w for group in optimizer.param_groups for w in group["params"]):
                        now.gradients.update(stepping.gradients_of(recorder, weight))
            self._made.add(optimizer)

        def ended(optimizer: Optimizer) -> None:
            with DisableTorchFunction():
                self.note_step(optimizer)
            if (now := learnt()) is not None:
                now.step(optimizer)
            after()

        stepping.watched(recorder, begins, ended)
        self.meet()
        for home, names in stepping.on_meta():
            put(home, names)


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    return list(getattr(optimizer, "param_groups", ()))


# -- keeping ---------------------------------------------------------------------------------------
# Turns of a script are opened and ended here; the recording of each goes into the book.

_ALIKE = 2
"""So many equal turns in a row, and those that look like them are not run again."""


class TurnKeeper:
    """The open turn, and those before it.

    recorder: of the script's run.
    """

    def __init__(self, recorder: ScriptRecorder, optimizers: Optimizers) -> None:
        self.book = Book()
        self.lengths = LengthForms(self.book)
        self.clock: HostClock = HostClock()
        self._recorder, self._optimizers = recorder, optimizers
        self._kinds, self._roots = Kinds(optimizers), Roots(recorder.device_tensors.shapes)
        self._loaded = LoadedBatches()  # for the next turn
        self._turn: OpenTurn | None = None
        self._steady: dict[Any, SteadyTurns] = {}
        self._results: list[Result] = []  # of the calls of the open turn
        self.variety = Variety()
        self._has_stepped = False  # an optimizer has, in a turn that has ended
        self.trained = self.called = 0  # training steps, and calls without gradients, so far

    def _begin(self, turn: OpenTurn, look: Look | None) -> OpenTurn:
        """Open a turn.  look: of the call that begins it; None: it begins before any call."""
        self._turn = turn
        turn.recorded = look is None or not self._is_known(turn, look)
        if turn.recorded and look is not None and self._may_differ_in_length(turn, look):
            turn.by_form = self.lengths.find(look)
            turn.recorded = turn.by_form is None
        turn.loaded, self._loaded = self._loaded, LoadedBatches()
        self.clock.began()
        self._optimizers.steps.clear()
        if turn.kind == TRAINING:
            self._recorder.values.begin_step()
        self._results = []
        recorder = self._recorder
        if turn.recorded or not recorder.entries.unread or recorder.is_long:
            self._renew(named=turn.recorded)
            recorder.entries.unread = not turn.recorded
        return turn

    def _is_known(self, turn: OpenTurn, look: Look) -> bool:
        """Whether a turn whose first call looks so is taken to be like those before it."""
        steady = self._steady.get(self._key(turn, look))
        is_steady = steady is not None and steady.alike >= _ALIKE and look.plain
        return is_steady and turn.kind not in self.variety.kinds

    def _may_differ_in_length(self, turn: OpenTurn, look: Look) -> bool:
        """Whether other lengths may predict a turn whose first call looks so."""
        return turn.kind == INFERENCE and look.plain and turn.kind not in self.variety.kinds

    def _key(self, turn: OpenTurn, look: Look | None) -> Any:
        """By what turns are alike: steps are one after another, calls by how the first looks."""
        return TRAINING if turn.kind == TRAINING or look is None else look.key

    def _renew(self, named: bool = True) -> None:
        """Drop the recording; later ops enter another graph.

        named: by modules, the states of optimizers, and the rest.
        """
        if named:
            self._recorder.renew(prepare=self._name)
        else:
            self._recorder.renew()

    def _name(self) -> None:
        recorder = self._recorder
        steps.enter_modules(recorder, self._roots.container)
        self._optimizers.enter(recorder)
        recorder.stand_in()

    def _finish(self, turn: OpenTurn) -> None:
        self._turn = None
        self._kinds.settle(turn)
        key = self._key(turn, turn.calls[0] if turn.calls else None)
        steady = self._steady.get(key)
        self._recorder.log = None
        if not turn.recorded and turn.by_form is not None:
            self.lengths.followed(turn.by_form, turn.after)
            self._add(turn, turn.by_form.stretch(self.book), run=0)
            return
        if not turn.recorded:
            if steady is not None and steady.stretch is not None:
                self._add(turn, steady.stretch, run=0)
            else:
                self.variety.note(turn.kind, self.called)
            return
        self._close_piece(turn)
        calls = tuple(look.key for look in turn.calls)
        plain = bool(calls) and all(look.plain for look in turn.calls)
        plain = plain and all(result.reusable for result in self._results)
        pieces = tuple(turn.pieces)
        stretch = Turns(
            kind=turn.kind,
            pieces=pieces,
            brought=turn.brought,
            taken=turn.taken,
            optimizers=tuple(dict.fromkeys(turn.learnt.optimizers)),
            label=turn.label,
            shape=turn.shape,
            passes=len(calls) if turn.is_accumulated else 1,
        )
        self._add(turn, stretch, run=1)
        if turn.ops is not None and turn.kind == INFERENCE and len(calls) == len(pieces) == 1:
            seen = Seen(
                look=turn.calls[0],
                ops=turn.ops,
                after=turn.after,
                result=self._results[0],
                place=pieces[0].graph,
                graph=self.book.graphs[pieces[0].graph],
                stretch=stretch,
            )
            self.lengths.learn(seen)
        before = steady if steady and (steady.pieces, steady.calls) == (pieces, calls) else None
        alike = (1 + (before.alike if before else 0)) * plain
        reached = {**(before.reached if before else {}), **turn.reached}
        self._steady[key] = SteadyTurns(pieces, calls, alike, list(self._results), stretch, reached)

    def _add(self, turn: OpenTurn, stretch: Turns, run: int) -> None:
        self.clock.ended(stretch.pieces)
        if self._optimizers.have_stepped() and not self._has_stepped:
            self._has_stepped, self.trained = True, 0  # passes before that were no steps
        if turn.kind == TRAINING:
            self.trained += 1
        else:
            self.called += 1
        self.book.add(
            replace(
                stretch,
                run=run,
                turns=1,
                by_form=int(turn.by_form is not None),
                loading=turn.loaded.seconds,
                batches=turn.loaded.batches,
                label=turn.label,
                shape=turn.shape,
            )
        )

    # -- turns that are like others ----------------------------------------------------------------

    def _record_rest(self, turn: OpenTurn) -> None:
        """A turn is not like the turns before: the rest of it is recorded."""
        turn.recorded, turn.by_form = True, None
        if turn.calls:
            self.variety.note(turn.kind, self.trained if turn.kind == TRAINING else self.called)
        self._renew()

    def _close_piece(self, turn: OpenTurn, named: bool = False) -> None:
        """Make the recording a piece, unless it was taken to equal the last piece.

        named: see `_renew`.
        """
        root, recorder = self._roots.container, self._recorder
        with recorder.lock:
            stepping.note_gradients(recorder, root, turn.learnt)
            turn.brought += recorder.brought_bytes
            turn.taken += recorder.taken_bytes
            if turn.repeating:
                turn.repeating = False
            else:
                turn.pieces.append(TurnPiece(self.book.graph(recorder, root, turn.learnt)))
            self._renew(named)
        turn.learnt.gradients.clear()  # the next graph numbers storages anew
