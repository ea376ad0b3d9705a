"""Finding the steps of a script while it runs.

A turn is a training step, or a call without gradients.  A training step ends before the first call
of a module after every optimizer has stepped.  Each call without gradients of a module that is
trained, or in a script that trains nothing, is a turn of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from rooftrace.tracer.phases import steps
from rooftrace.tracer.scripts.book import Book
from rooftrace.tracer.scripts.calls import Look, Result, look_of, says
from rooftrace.tracer.scripts.clocks import HostClock
from rooftrace.tracer.scripts.optimizers import Optimizers
from rooftrace.tracer.scripts.presenting import Shapes
from rooftrace.tracer.scripts.recorders import ScriptRecorder
from rooftrace.tracer.scripts.records import INFERENCE, TRAINING, Piece, Stretch
from rooftrace.tracer.scripts.stage import Stage
from rooftrace.tracer.tensors import tensors_in

_ALIKE = 2
"""So many equal turns in a row, and those that look like them are not run again."""
_WAITS_FOR_OTHERS = 8
"""An optimizer may step so often in one training step while another has not stepped at all."""

_LONG = 1000
"""Ops that a recorder may hold of turns that need no graph, before another takes its place."""


@dataclass
class _Turn:
    """The turn that is open."""

    kind: str
    label: str
    learnt: Any
    recorded: bool = True  # False: it is taken to be like one that was
    calls: list[Look] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    backwards: int = 0  # how many of the calls were followed by a backward
    repeating: bool = False  # what runs is taken to be like the last piece
    loading: float = 0.0
    batches: int = 0
    brought: int = 0
    taken: int = 0

    def repeat(self) -> None:
        """The last piece ran once more."""
        last = self.pieces[-1]
        self.pieces[-1] = Piece(last.graph, last.times + 1)


@dataclass
class _Steady:
    """The last turns of one kind, which were equal."""

    pieces: tuple[Piece, ...] = ()
    calls: tuple[Any, ...] = ()
    alike: int = 0
    results: list[Result] = field(default_factory=list)
    stretch: Stretch | None = None


class Finder:
    """Is told what a script does, and has the recorder record it turn by turn.

    stage: has the recorder.  steps: so many turns are wanted; then `stop` is called, which raises.
    """

    def __init__(
        self,
        stage: Stage,
        shapes: Shapes,
        optimizers: Optimizers,
        wanted: int | None,
        stop: Callable[[], None],
    ) -> None:
        self.book = Book()
        self.clock: HostClock = HostClock()
        self._stage, self._shapes, self._optimizers = stage, shapes, optimizers
        self._wanted, self._stop = wanted, stop
        self._roots: list[nn.Module] = []
        self._turn: _Turn | None = None
        self._steady: dict[Any, _Steady] = {}
        self._unread = False  # what the recorder has is of turns that need no graph
        self._results: list[Result] = []  # of the calls of the open turn
        self._vary: set[str] = set()  # kinds of turns that began alike and went on otherwise
        self._before: Counter[int] | None = None  # steps of optimizers before a capture
        self.said: dict[str, str] = {}  # what could not be counted, by kind
        self.trained = 0  # training steps so far
        self.called = 0  # calls without gradients so far

    # -- what the script does ----------------------------------------------------------------------

    def call(
        self,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        run: Callable[[], Any],
    ) -> Any:
        """A module is called from outside of any module; run: runs it."""
        if self.suspended or torch._C._current_autograd_node() is not None:
            return run()
        with torch._C.DisableTorchFunction():
            here = self._on_device(module, (args, kwargs))
            known = self._known(module, args, kwargs) if here else None
        if not here:
            return run()
        if known is not None:
            return known[0]
        output = run()
        with torch._C.DisableTorchFunction():
            self._results.append(Result(output, self._stage.recorder.values))
        return output

    def _known(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any] | None:
        """What the call returns, where it need not run; else None, and the turn is ready for it."""
        look = look_of(module, args, kwargs)
        self._meet(module)
        turn = self._turn_of(look, module, says(module, args, kwargs))
        if not turn.recorded:
            result = self._answer(turn, look)
            if result is not None:
                turn.calls.append(look)
                return (result.again(module, self._stage.recorder.values, (args, kwargs)),)
            turn = self._record_after_all(turn)
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
        turn = self._turn
        if turn is not None and turn.repeating:
            self._next_piece(turn)

    def loaded(self, seconds: float) -> None:
        """A data loader gave a batch, after so many seconds."""
        if self._turn is not None:
            self._turn.loading += seconds
            self._turn.batches += 1

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
            if turn.kind != TRAINING or self._stepped(turn):
                self._finish(turn)
                return 0.0
        steady = self._steady.get(TRAINING)
        calls = len(steady.calls) if steady is not None else 0
        return min(len(turn.calls) / calls, 1.0) if calls else 0.0

    @property
    def recorder(self) -> ScriptRecorder:
        """The one that is on."""
        return self._stage.recorder

    @property
    def suspended(self) -> bool:
        """Whether what runs is no part of any turn, and runs whatever it looks like."""
        return self._before is not None

    def suspend(self) -> None:
        """A CUDA graph is being captured."""
        self._end_whole()
        self._before = Counter(self._optimizers.steps)
        self._aside()

    def resume(self) -> None:
        """The capture has ended."""
        self._aside()
        self._optimizers.steps, self._before = self._before or Counter(), None

    def _end_whole(self) -> None:
        turn = self._turn
        if turn is not None and (turn.kind != TRAINING or self._stepped(turn)):
            self._finish(turn)

    def _aside(self) -> None:
        """Outside of turns, what was recorded is dropped."""
        if self._turn is None:
            self.book.discard(self._stage.change(record=True))
            self._name()

    def take_part(self, look: Look, label: str) -> None:
        """A CUDA graph is about to be replayed: a turn of its own, or a part of the open one."""
        self._end_whole()
        turn = self._turn
        if turn is None:
            kind = TRAINING if self._optimizers.known else INFERENCE
            if self._has_run_enough(kind):
                self._stop()
            turn = self._begin(kind, look, label)
        elif not turn.recorded:
            turn = self._record_after_all(turn)
        turn.calls.append(look)

    def replayed(self, classes: Container[str]) -> None:
        """A replay has ended, in which optimizers of these classes have stepped."""
        for key, name in self._optimizers.names().items():
            if name in classes:
                self._optimizers.steps[key] += 1
                if self._turn is not None:
                    self._turn.learnt.optimizers.append(name.lower())

    @property
    def learnt(self) -> steps.Learnt | None:
        """What is known of the open turn; None where none is open."""
        return None if self._turn is None else self._turn.learnt

    # -- turns -------------------------------------------------------------------------------------

    def _on_device(self, module: nn.Module, arguments: Any) -> bool:
        weight = next(iter(module.parameters()), None)
        if weight is None:
            weight = next(iter(module.buffers()), None)
        if weight is not None:
            return self._is_there(weight)
        return any(self._is_there(tensor) for tensor in tensors_in(arguments))

    def _is_there(self, tensor: Tensor) -> bool:
        return tensor.is_meta and tensor not in self._shapes

    def _meet(self, module: nn.Module) -> None:
        """A module is called from outside: recorders to come know its parts by their names."""
        if any(module is part for root in self._roots for part in root.modules()):
            return
        inside = {id(part) for part in module.modules()}
        weighs = next(iter(module.parameters()), None) is not None
        if weighs or not self._roots:
            self._roots = [root for root in self._roots if id(root) not in inside] + [module]

    def _turn_of(self, look: Look, module: nn.Module, label: str) -> _Turn:
        """The turn that a call belongs to: the open one, or a new one."""
        turn = self._turn
        kind = self._kind(module)
        if turn is not None:
            if turn.kind == TRAINING and not self._stepped(turn):
                turn.backwards += self._backward_ran()
                return turn
            self._finish(turn)
        if self._has_run_enough(kind):
            self._stop()
        return self._begin(kind, look, label)

    def _has_run_enough(self, kind: str) -> bool:
        """Whether the wanted steps have run: training steps, or calls where nothing trains."""
        if self._wanted is None:
            return False
        if kind == TRAINING:
            return self.trained >= self._wanted
        return not self._optimizers.known and self.called >= self._wanted

    def _kind(self, module: nn.Module) -> str:
        known = self._optimizers.known
        if torch.is_grad_enabled():
            return TRAINING if known else INFERENCE
        if not known or self._optimizers.trains(module):
            return INFERENCE
        return TRAINING  # another model that helps to train

    def _stepped(self, turn: _Turn) -> bool:
        """Whether the optimizers of a training step have all stepped."""
        times = self._optimizers.steps
        if not times:
            return False
        if self._optimizers.required() <= times.keys():
            return True
        return max(times.values()) >= _WAITS_FOR_OTHERS

    def _backward_ran(self) -> bool:
        return self._stage.recorder.after_backward

    def _begin(self, kind: str, look: Look, label: str) -> _Turn:
        key = TRAINING if kind == TRAINING else look.key
        steady = self._steady.get(key)
        known = steady is not None and steady.alike >= _ALIKE and look.plain
        known = known and kind not in self._vary
        turn = self._turn = _Turn(kind, label, steps.Learnt(), recorded=not known)
        self.clock.began()
        self._optimizers.steps.clear()
        self._results = []
        if turn.recorded or not self._unread or len(self._stage.recorder.graph.nodes) > _LONG:
            self.book.discard(self._stage.change(record=True))
        self._unread = not turn.recorded
        if turn.recorded:
            self._name()
        return turn

    def _name(self) -> None:
        recorder = self._stage.recorder
        root = steps.container_of(self._roots)
        steps.enter_modules(recorder, root)
        self._optimizers.enter(recorder)

    def _finish(self, turn: _Turn) -> None:
        self._turn = None
        key = TRAINING if turn.kind == TRAINING else turn.calls[0].key
        steady = self._steady.get(key)
        if not turn.recorded:
            assert steady is not None and steady.stretch is not None
            self._add(turn, steady.stretch, run=0)
            return
        self._close_piece(turn)
        calls = tuple(look.key for look in turn.calls)
        plain = all(look.plain for look in turn.calls) and all(r.known for r in self._results)
        pieces = tuple(turn.pieces)
        stretch = Stretch(
            kind=turn.kind,
            pieces=pieces,
            brought=turn.brought,
            taken=turn.taken,
            optimizers=tuple(dict.fromkeys(turn.learnt.optimizers)),
            label=turn.label,
        )
        self._add(turn, stretch, run=1)
        same = steady is not None and (steady.pieces, steady.calls) == (pieces, calls)
        alike = (steady.alike + 1 if same and steady is not None else 1) if plain else 0
        self._steady[key] = _Steady(pieces, calls, alike, list(self._results), stretch)

    def _add(self, turn: _Turn, stretch: Stretch, run: int) -> None:
        self.clock.ended(stretch.pieces, turn.loading)
        if turn.kind == TRAINING:
            self.trained += 1
        else:
            self.called += 1
        self.book.add(
            replace(stretch, run=run, loading=turn.loading, batches=turn.batches, turns=1)
        )

    # -- turns that are like others ----------------------------------------------------------------

    def _answer(self, turn: _Turn, look: Look) -> Result | None:
        """What the call gave in the turn that this one is like; None where it is not."""
        steady = self._steady[TRAINING if turn.kind == TRAINING else look.key]
        place = len(turn.calls)
        if place < len(steady.calls) and steady.calls[place] == look.key:
            return steady.results[place]
        return None

    def _record_after_all(self, turn: _Turn) -> _Turn:
        """A turn that was taken to be like others is not: the rest of it is recorded.

        What ran of it before is not known; from here on every turn of this kind is recorded.
        """
        turn.recorded = True
        if turn.calls:
            self._vary.add(turn.kind)
            self.said[f"{turn.kind} turns that differ"] = (
                f"{turn.kind} turn {self._number(turn)} began as the ones before it and went on "
                "otherwise: its first calls were not run and are not counted in it"
            )
        self.book.discard(self._stage.change(record=True))
        self._name()
        return turn

    def _number(self, turn: _Turn) -> int:
        return 1 + (self.trained if turn.kind == TRAINING else self.called)

    # -- gradient accumulation -------------------------------------------------------------------

    def _accumulates(self, turn: _Turn, look: Look) -> bool:
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

    def _next_piece(self, turn: _Turn) -> None:
        self._close_piece(turn)
        self._name()

    def _close_piece(self, turn: _Turn) -> None:
        """What was recorded becomes a piece; what was taken to be like the last one does not."""
        recorder = self._stage.recorder
        root = steps.container_of(self._roots)
        steps.note_gradients(recorder, root, turn.learnt)
        old = self._stage.change(record=True)
        turn.brought += old.brought_bytes
        turn.taken += old.taken_bytes
        if turn.repeating:
            turn.repeating = False
            self.book.discard(old)
        else:
            turn.pieces.append(Piece(self.book.graph(old, root, turn.learnt)))
