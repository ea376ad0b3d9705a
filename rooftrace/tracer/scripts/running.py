"""Running a script to the end of its wanted steps, and what it was found to consist of."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rooftrace.tracer.patches import Scope
from rooftrace.tracer.scripts.finding import Finder
from rooftrace.tracer.scripts.optimizers import Optimizers
from rooftrace.tracer.scripts.presenting import Shapes, moved_in_place
from rooftrace.tracer.scripts.recorders import ScriptRecorder
from rooftrace.tracer.scripts.records import Script
from rooftrace.tracer.scripts.stage import Stage
from rooftrace.tracer.scripts.watching import compiling, watched
from rooftrace.tracer.values import Values


class Watch:
    """Everything that records one run; `finder` has what was found."""

    def __init__(
        self,
        index: int,
        wanted: int | None,
        stop: Callable[[], None],
        assume: Any = None,
    ) -> None:
        self.scope = Scope()
        self.scope.spans = True
        self.values = Values(assume=assume or {})
        self.shapes = Shapes()
        self.shown = torch.device("cuda", index)
        self.optimizers = Optimizers()
        self.compiled: list[str] = []
        with self.scope.entered():
            self.stage = Stage(self._recorder)
        self.finder = Finder(self.stage, self.shapes, self.optimizers, wanted, stop)

    def _recorder(self, record: bool) -> ScriptRecorder:
        return ScriptRecorder(self.values, record, self.shown, self.shapes)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Inside, what this thread runs is watched.  The scope of the run is entered."""
        finder = self.finder
        with contextlib.ExitStack() as undo:
            undo.enter_context(watched(finder))
            undo.enter_context(moved_in_place())
            undo.enter_context(compiling(self.compiled))
            undo.enter_context(
                self.optimizers.watched(
                    lambda: self.stage.recorder, finder.before_step, lambda: finder.learnt
                )
            )
            undo.callback(self.values.close)
            self.stage.open()
            undo.callback(self.stage.close)
            yield
            with torch._C.DisableTorchFunction():
                finder.end()

    def script(self, name: str, began: float, **facts: Any) -> Script:
        """The record of the run."""
        return Script(
            name=name,
            graphs=tuple(self.finder.book.graphs),
            stretches=tuple(self.finder.book.stretches),
            compiled=bool(self.compiled),
            seconds=time.perf_counter() - began,
            **facts,
        )
