"""Turns of a script are opened and ended here; what was recorded of each goes into the book."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from rooftrace.tracer.phases import stepping, steps
from rooftrace.tracer.scripts.book import Book
from rooftrace.tracer.scripts.calls import Look, Result
from rooftrace.tracer.scripts.clocks import HostClock
from rooftrace.tracer.scripts.kinds import Kinds
from rooftrace.tracer.scripts.lengths import LengthForms, Seen
from rooftrace.tracer.scripts.optimizers import Optimizers
from rooftrace.tracer.scripts.recorders import ScriptRecorder
from rooftrace.tracer.scripts.records import INFERENCE, TRAINING, TurnPiece, Turns
from rooftrace.tracer.scripts.roots import Roots
from rooftrace.tracer.scripts.turns import LoadedBatches, OpenTurn, SteadyTurns, Variety

_ALIKE = 2
"""So many equal turns in a row, and those that look like them are not run again."""


class TurnKeeper:
    """The open turn, and those before it.

    recorder: of the whole run.
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
        known = steady is not None and steady.alike >= _ALIKE and look.plain
        return known and turn.kind not in self.variety.kinds

    def _may_differ_in_length(self, turn: OpenTurn, look: Look) -> bool:
        """Whether other lengths may tell what a turn does whose first call looks so."""
        return turn.kind == INFERENCE and look.plain and turn.kind not in self.variety.kinds

    def _key(self, turn: OpenTurn, look: Look | None) -> Any:
        """By what turns are alike: steps are one after another, calls by how the first looks."""
        return TRAINING if turn.kind == TRAINING or look is None else look.key

    def _renew(self, named: bool = True) -> None:
        """What was recorded is dropped, and what runs from here on enters another graph.

        named: which knows the modules, the states of optimizers, and what else there is.
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
        plain = plain and all(result.known for result in self._results)
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
        """What was recorded becomes a piece; what was taken to be like the last one does not.

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
