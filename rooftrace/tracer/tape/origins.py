"""Where an op comes from: its module, the part of the step, the function and the source line.

In backward the origin is that of the forward op which the running autograd node differentiates;
both carry the number of the node.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any

import torch
from msgspec.structs import replace

from rooftrace.tracer.collectives import marks
from rooftrace.tracer.source import source_line
from rooftrace.tracer.tape.entries import Entries
from rooftrace.tracer.tape.here import Here
from rooftrace.tracer.tape.recompute import Recomputation, running_node
from rooftrace.tracer.tape.records import CompiledCall, Origin, compiling
from rooftrace.tracer.tensors import owners


class Origins:
    """Finds the origins of the ops of one recording."""

    def __init__(self, here: Here, entries: Entries) -> None:
        self._here, self._entries = here, entries
        self.recomputation = Recomputation()
        self.tells_compiled = False  # which ops torch.compile would compile
        self._last: CompiledCall | None = None  # in which the last kernel ran
        self._said: Origin | None = None  # of every op
        self._by_number: dict[int, Origin] = {}  # of the op of an autograd node
        # By line and op: the modules that ran it, each with the number of the call.
        self._by_source: dict[tuple[str, str], dict[str, int]] = {}

    def origin(self, name: str, loop: tuple[int, int] | None) -> Origin:
        """Where the op of this name that is being run comes from.

        loop: the turn of a loop that is running (see `Origin`).
        """
        if self._said is not None:
            return self._said
        here = self._here
        part = self._part_of_own_step(name) if self._entries.own_step else here.part
        compiled = compiling.call if self.tells_compiled else None
        if part == "optimizer":
            return Origin("", 0, part, here.function, compiled=compiled)
        if part == "backward":
            if not self._runs_again():
                return self._of_backward(compiled)
            compiled = compiled or self._of_backward(None).compiled
            part = "recompute"
        source = source_line(4) or here.source
        if here.stack:
            path, call = here.stack[-1]
        elif part == "recompute":
            path, call = self._of_recomputed(source, name)
        else:
            path, call = "", 0
        origin = Origin(path, call, part, here.function, source, loop, compiled)
        if part == "forward":
            self._by_source.setdefault((source, name), {})[path] = call
        self.note(origin)
        return origin

    @contextlib.contextmanager
    def all_from(self, origin: Origin) -> Iterator[None]:
        """Inside, this is where ops come from: they run again, apart from their code."""
        before, self._said = self._said, origin
        try:
            yield
        finally:
            self._said = before

    def _of_recomputed(self, source: str, name: str) -> tuple[str, int]:
        """The module, and the call, of an op that a checkpoint's function runs outside of modules.

        Of those that ran this op at this line in forward it is the nearest to what the running
        node differentiates, which is in the same checkpoint.
        """
        ran = self._by_source.get((source, name), {})
        steps = self._of_backward(None).module.split(".")
        best, shared = "", -1
        for path in ran:  # the last one of equals
            own = path.split(".") if path else []
            pairs = zip(own, steps, strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            if same >= shared:
                best, shared = path, same
        return best, ran.get(best, 0)

    def note(self, origin: Origin) -> None:
        """Remember the origin of the last op by autograd number; the first op of a number counts.

        The autograd node of an op exists before the op runs and has the newest number.
        Later ops without a node (integers, a kernel's inner ops) see the same number.
        """
        self._by_number.setdefault(torch._C._autograd._get_sequence_nr() - 1, origin)

    def name(self, number: int, path: str) -> None:
        """What the autograd node of this number does belongs to the module at `path`."""
        self._by_number[number] = Origin(path)

    def _runs_again(self) -> bool:
        """Whether the running autograd node has called forward code: a module, or code that turned
        gradients on.  False before the engine starts, when it gets its first gradients."""
        node = running_node()
        if node is None:
            return False
        calls = self._here.called_for
        return (bool(calls) and calls[-1] == node) or self.recomputation.active(node)

    def _part_of_own_step(self, name: str) -> str:
        """The part of the running op in a step that does not name its parts."""
        here = self._here
        if here.part != "forward":
            return here.part
        if torch._C._current_autograd_node() is not None:
            return "backward"
        # Clipping, scaling and averaging stand between backward and step, outside of modules.
        # So do exchanges of weights that each process has stepped a part of.
        outside = not torch.is_grad_enabled() or name.startswith("c10d.")
        updates = here.after_backward and not here.stack and outside
        return "optimizer" if updates else "forward"

    def _of_backward(self, compiled: CompiledCall | None) -> Origin:
        """The origin of the forward op that the running autograd node differentiates.

        compiled: the call of a compiled callable that runs now, which a hook may have begun.
        """
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return Origin("", 0, "backward", self._here.function, compiled=compiled)
        name = node.name()
        number = node._sequence_nr()
        if name.endswith("CopySlices"):
            number -= 1  # wraps the node of the op that wrote into a view, made just before it
        origin = self._by_number.get(number)
        if origin is not None:
            compiled = origin.compiled or compiled
            return replace(origin, part="backward", function=name, compiled=compiled)
        variable = getattr(node, "variable", None)
        owner = "" if variable is None else self._entries.name_of(variable).rpartition(".")[0]
        compiled = compiled or self._last  # gradients leave compiled code when all of it has run
        return Origin(owners.shown_path(owner), 0, "backward", name, compiled=compiled)

    def noted(
        self, facts: Mapping[str, Any] | None, origin: Origin, beside: bool | str
    ) -> Mapping[str, Any]:
        """The facts of an op that is recorded now, with what it tells of compiled code: in which
        callable of the script's it runs, and whether it is the first of a call.

        beside: it is a view, or on another stream than the main one, whose name this is.
        """
        before, call = self._last, origin.compiled
        if call is None:
            self._last = before if beside else None
            return facts or {}
        self._last = call
        told = {marks.COMPILED: call.name} | ({} if call is before else {marks.ENTERS: True})
        return {**(facts or {}), **told}

    def compiled_here(self) -> tuple[str, bool] | None:
        """Which callable an op that ran here would tell of, and whether it would begin a call."""
        call = compiling.call if self.tells_compiled else None
        return None if call is None else (call.name, call is not self._last)

    def compiled_repeated(self) -> None:
        """Ops that ran here are recorded by reference to equal ones."""
        self._last = compiling.call if self.tells_compiled else None
