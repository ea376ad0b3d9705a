"""Where turns begin if the user says so: at marks, at batches, at calls, at steps of optimizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rooftrace.errors import RequestError, hint
from rooftrace.hardware.units import listed
from rooftrace.scripts.steps.calls import Look, ModuleCall
from rooftrace.scripts.steps.finding import Finder
from rooftrace.scripts.steps.keeping import Kinds, weighs
from rooftrace.scripts.steps.records import INFERENCE, TRAINING
from rooftrace.scripts.steps.watching import OpenTurn
from rooftrace.tracer import names, torch_private

_SHOWN = 12
"""How many names of marks an error lists."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """The event that begins a turn.

    at: "auto": calls of modules and steps of optimizers, as `Kinds` reads them; "batch": a data
    loader gives one; "call": a module with weights is called from outside of any module;
    "optimizer": all optimizers have stepped; "mark": the script says `name`, with
    `torch.profiler.record_function`, `torch.cuda.nvtx`, or `step()` of its profiler ("step").
    """

    at: str = "auto"
    name: str = ""

    @staticmethod
    def of(text: str) -> Boundary:
        """A boundary as users write it: "batch", "mark=train_step".  Raises RequestError."""
        at, _, name = text.partition("=")
        if at not in names.BOUNDARIES or (at == "mark") != bool(name):
            raise RequestError(
                f"--boundary {text!r:.60}: expected auto, batch, call, optimizer or mark=NAME"
                f"{hint(at, names.BOUNDARIES)}"
            )
        return Boundary(at, name)


class AskedKinds(Kinds):
    """Turns begin where the user says; a step is one in which a backward or an optimizer ran."""

    at_calls = False

    def of(self, module: nn.Module) -> str:
        """The kind that a turn probably has."""
        return TRAINING if self.train and torch.is_grad_enabled() else INFERENCE

    def differentiated(self, turn: OpenTurn) -> None:
        """A backward has run in a turn."""
        super().differentiated(turn)
        turn.kind = TRAINING

    def is_complete(self, turn: OpenTurn) -> bool:
        """Never before the next begins, but for calls."""
        return self.at_calls

    def goes_on(self, turn: OpenTurn, module: nn.Module, arguments: Any, brought: int) -> bool:
        """Whether a call belongs to the open turn."""
        return not self.at_calls or not weighs(module)


class BoundaryFinder(Finder):
    """A finder whose turns begin where a boundary says."""

    def __init__(self, *arguments: Any, boundary: Boundary | None = None) -> None:
        super().__init__(*arguments)
        self._boundary = Boundary()
        self._unnamed = False  # the open turn began before any module was met
        self._marks: dict[str, int] = {}  # how often each was met
        if boundary is not None and boundary.at != "auto":
            self._ask(boundary)

    def _ask(self, boundary: Boundary) -> None:
        self._boundary = boundary
        self._kinds = kinds = AskedKinds(self._optimizers)
        kinds.at_calls = boundary.at == "call"

    def loaded(self, seconds: float) -> None:
        """A data loader gave a batch."""
        if self._boundary.at != "batch":
            super().loaded(seconds)
            return
        self.clock.loaded(seconds)
        self._next("a batch")
        if self._turn is not None:
            self._turn.loaded.add(seconds)

    def marked(self, name: str) -> None:
        """The script, or a library, has come to a mark."""
        with self.leading() as leads:
            if leads:
                self._marks[name] = self._marks.get(name, 0) + 1
                if self._boundary == Boundary("mark", name):
                    self._next(name)

    def stepped(self) -> None:
        """An optimizer has stepped."""
        with self.leading() as leads:
            if leads:
                self._stepped_here()

    def _stepped_here(self) -> None:
        if self._boundary.at == "auto" and self._turn is None and not self._roots.met:
            self._ask(Boundary("optimizer"))
            self.variety.said["steps without modules"] = (
                "the script steps an optimizer and calls no module: a turn runs from the end of "
                "one step to the end of the next, and the first one is not recorded"
            )
        if self._boundary.at == "optimizer" and (
            self._turn is None or self._optimizers.have_stepped()
        ):
            self._next("a step")

    def end(self) -> None:
        """The script has ended."""
        turn, at = self._turn, self._boundary.at
        if turn is not None and at == "optimizer" and not self._optimizers.have_stepped():
            self._turn = None  # code after the last step is no step
        elif turn is not None and at != "auto" and not turn.calls:
            self._finish(turn)
        super().end()

    def check(self) -> None:
        """Raises RequestError if the script never came to the wanted mark."""
        if self._boundary.at == "mark" and self._boundary.name not in self._marks:
            marks = sorted(self._marks, key=lambda name: -self._marks[name])
            which = f"its marks are {listed(marks[:_SHOWN])}" if marks else "it has no marks"
            raise RequestError(
                f"--boundary mark={self._boundary.name}: the script never came to it; {which}"
                f"{hint(self._boundary.name, marks)}"
            )

    def _next(self, label: str) -> None:
        """A turn begins here, before any call of a module."""
        with torch_private.DisableTorchFunction():
            if self._turn is not None:
                self._note_backward(self._turn)
                self._finish(self._turn)
            kind = TRAINING if self._kinds.train else INFERENCE
            if self._has_run_enough(kind):
                self._stop()
            self._unnamed = not self._roots.met
            self._begin(OpenTurn(kind, label), None)
            self._recorder.here.after_backward = False

    def _has_run_enough(self, kind: str) -> bool:
        if self._boundary.at == "auto":
            return super()._has_run_enough(kind)
        done = self.trained if self._kinds.train else self.called
        return self._wanted is not None and done >= self._wanted

    def _turn_of(self, look: Look, made: ModuleCall) -> OpenTurn:
        turn = super()._turn_of(look, made)
        if self._boundary.at != "auto" and not turn.calls and turn.recorded:
            if self._unnamed:  # the first called module was unknown when it began
                self._name()
            turn.kind, turn.shape = self._kinds.of(made.module), made.shape
            turn.recorded = not self._is_known(turn, look)
            self._recorder.entries.unread = not turn.recorded
        return turn

    def _key(self, turn: OpenTurn, look: Look | None) -> Any:
        if self._boundary.at == "auto":
            return super()._key(turn, look)
        return None if look is None else look.key

    def _finish(self, turn: OpenTurn) -> None:
        if self._boundary.at != "auto":
            if not turn.calls and not self._recorder.has_ops:  # nothing ran on the device
                self._turn, self._loaded = None, turn.loaded
                return
            differentiated = turn.backwards or self._recorder.here.after_backward
            trained = differentiated or self._optimizers.steps
            turn.kind = TRAINING if trained else INFERENCE
        super()._finish(turn)
