"""Scans: a `for t in range(n)` of equal turns runs four of them, and one stands for the rest.

While a recorder is entered, `range` in the modules of the traced code is ours.  A loop whose body
is simple enough runs turns 0, 1 and 2 and then the last (where autograd runs, the last ones); turn
2 stands for itself and the turns left out.

Why the turns that are left out would have recorded the ops of turn 2:

1. The body is straight: assignments and calls, without a condition, a loop or an inner function
   (`read_body`).  It calls torch's functions of tensors and methods of tensors, which do the same
   whenever their arguments look the same and nobody asks for the value of a tensor.
2. What a turn can see is the names in its body.  Each is a tensor, a plain Python value, or a list
   that the body only appends to, and so never reads.  How they look (`loop_state`: sizes, strides,
   precision, gradients, shared memory, whether it has a value) is the state of the loop.
3. The loop variable stands only in indices of a tensor that the body does not replace, as a sum
   or a product with integers.  So it changes the numbers of `select` and `slice` ops by a constant
   step, and nothing else.  A select looks the same at every index; a slice does where its ends
   move together and stay inside of the tensor: between two turns if they do in both.
4. No op of turns 1 and 2 reads a value, runs on the host, or makes a constant; a view of a
   constant may be written into, and is not read.
5. The state after turn 2 is the state after turn 1.  With 1 to 4 a turn is a function of that
   state, so turn 3 starts where turn 2 started, and so on up to the last.
6. The ops of turns 1 and 2 are compared too, with their inputs: made in the same turn, in the
   turn before at the same place, or before both.  So turn 3 reads from turn 2 what 2 reads from 1.

And in backward, which runs from the last turn to the first:

7. Which ops of a turn have a gradient depends on which of the values that it hands on have one.
   What follows the loop decides that for the last turn.  As each of them depends on itself
   (`carried`; a tensor written in place always does), their number can only grow from turn to
   turn: after as many turns as values, and one more, it has settled, and with it the sums of
   gradients over turns.  So many turns are run at the end, and one more: turn 3 then reads the
   gradients of a turn like itself, as the turns before it do.

The last turn is run, so code after the loop finds its names as they would be; an index that is
out of range still fails.  A list gets stand-ins for the turns left out.  They take part in
autograd, so that later code records the same backward, but their gradients go nowhere.  In a list
that is only stacked or concatenated they do not, and their gradients, which would be views that
nothing reads, are not recorded.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from rooftrace.tracer import source_line, torch_private
from rooftrace.tracer.recording import Call, LoopWatch, Scope, Tape
from rooftrace.tracer.repeats.iterations import (
    RUN,
    SELECT,
    SLICE,
    LoopState,
    Turn,
    carried,
    loop_state,
    ops_of,
    same_op,
    unchanged,
    wiring,
    written,
)
from rooftrace.tracer.repeats.loop_bodies import Body, FrameNames, Refused, bodies_of, fits
from rooftrace.tracer.values import META, trees

MIN_TURNS = 8
"""Shorter loops are run as they are written."""
_STACK = torch.ops.aten.stack.default
_CAT = torch.ops.aten.cat.default


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop of which only some turns were run."""

    count: int  # how many turns its turn 2 stands for, itself too
    source: str  # the line of its `for`
    function: str  # in which it stands


class _StandIns(torch.autograd.Function):
    """Tensors that look like one and require a gradient if it does, but pass none back to it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, count: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple([_like(tensor) for _ in range(count)])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None]:
        return None, None


def _like(tensor: Tensor) -> Tensor:
    shape, stride = tuple(tensor.shape), tensor.stride()
    return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=META)


class _Shortened:
    """Stands in for `range`: yields every index, or only the first three and the last few."""

    def __init__(self, rolling: Rolling, values: range, body: Body, frame: FrameType) -> None:
        self.rolling, self.values, self.body, self.frame = rolling, values, body, frame
        self.tape = rolling.tape
        self.turns: list[Turn] = []
        self.states: list[LoopState] = []
        self.last = 1

    def __iter__(self) -> Iterator[int]:
        values = self.values
        serial = next(self.rolling.serials)
        source, function = source_line(1), self.frame.f_code.co_name
        try:
            for number in range(RUN):
                self._begin((serial, number))
                yield values[number]
                if not self._may_go_on(number):
                    self.rolling.turn = None
                    yield from values[number + 1 :]
                    return
            left_out = len(values) - RUN - self.last
            self._stand_in(left_out)
            self.rolling.loops[serial] = Loop(left_out + 1, source, function)
            for number, value in enumerate(values[-self.last :], RUN):
                self._begin((serial, number))
                yield value
        finally:
            self.rolling.turn = None
            del self.frame

    def _begin(self, label: tuple[int, int]) -> None:
        tape = self.tape
        turn = Turn(label, _last(tape.graph), tape.tags.storages)
        self.turns.append(turn)
        self.rolling.turn = turn

    def _may_go_on(self, number: int) -> bool:
        """Whether, after this turn, the loop may still be cut short."""
        if number == 0:
            return True
        with torch_private.DisableTorchFunction(), contextlib.suppress(Refused):
            names = FrameNames(self.frame)
            try:
                if self.turns[-1].plain and fits(self.body, names):
                    self.states.append(loop_state(self.body, names, self.tape))
                    return number == 1 or self._repeats()
            finally:
                names.forget()
        return False

    def _repeats(self) -> bool:
        """Whether turn 2 ran as turn 1, and left its names as they were."""
        first, second = self.turns[1].ops, self.turns[2].ops
        pairs = zip(first, second, strict=False)
        return (
            unchanged(*self.states)
            and len(first) == len(second)
            and all(same_op(a, b, len(self.values)) for a, b in pairs)
            and (not self.tape.recording or self._same_wiring())
            and len(self.values) > RUN + self.last
        )

    def _same_wiring(self) -> bool:
        ends = [self.turns[1].node, self.turns[2].node, _last(self.tape.graph)]
        ops = [ops_of(end, turn) for end, turn in zip(ends, self.turns, strict=True)]
        first, second = (wiring(number, ops, self.turns) for number in (1, 2))
        if torch.is_grad_enabled():
            self.last = 2 + carried([reads for reads, _, _ in second]) + written(second)
        return first == second

    def _stand_in(self, count: int) -> None:
        """Make the lists as long as the turns left out would have."""
        names = FrameNames(self.frame)
        for name in self.body.lists:
            items = names.get(name)
            joined = name in self.body.joined and names.get("torch") is torch
            items += self._like(items[-1], count, joined)
        names.forget()

    def _like(self, tensor: Tensor, count: int, joined: bool) -> list[Tensor]:
        """Stand-ins for a tensor: one object repeated, or one for each turn if each needs a
        separate gradient."""
        if not tensor.requires_grad:
            return [tensor] * count
        if joined:
            made = tensor.detach()
            self.rolling.detached[id(made)] = made
            return [made] * count
        with torch_private.DisableTorchFunction(), torch_private.disable_current_modes():
            if self.tape.recording:
                self.tape.node_of(tensor)
            separate: Any = _StandIns.apply(tensor, count)  # type: ignore[no-untyped-call]
            for item in separate:
                self.tape.tags.same_as(item, tensor)
        return list(separate)


def _last(graph: fx.Graph) -> fx.Node:
    return graph._root.prev


# -- the name `range` in the modules of the traced code --------------------------------------------


class Rolling(LoopWatch):
    """The loops of one recording: which module names are replaced, and which turn is running."""

    def __init__(self, tape: Tape, enabled: bool) -> None:
        self.tape, self.enabled = tape, enabled
        self.loops: dict[int, Loop] = {}  # those that were cut short, by serial number
        self.turn: Turn | None = None
        self.serials = itertools.count()
        self.detached: dict[int, Tensor] = {}
        self._unread: dict[int, frozenset[int]] = {}
        self._namespaces: dict[int, dict[str, Any]] = {}

    @property
    def label(self) -> tuple[int, int] | None:
        """The loop that is running, by its serial number, and which of its turns 0 to 3."""
        return self.turn.label if self.turn is not None else None

    def depends(self) -> None:
        """Something ran that may depend on a value: the running loop is not cut short."""
        if self.turn is not None:
            self.turn.plain = False

    def is_short(self, serial: int) -> bool:
        """Whether the loop of this number was not run in full."""
        return serial in self.loops

    def saw(self, call: Call, outputs: Sequence[Tensor]) -> bool:
        """Look at an op that has run; False for one that is not to be recorded."""
        func = call.func
        if self.turn is not None:
            values = self.tape.values
            with_values = [output for output in outputs if values.known(output) is not None]
            self.turn.saw(call, outputs, with_values)
        elif self._unread and (func is SELECT or func is SLICE):
            node: Any = torch_private.current_autograd_node()
            return node is None or call.args[2] not in self._unread.get(node._sequence_nr(), ())
        elif self.detached and (func is _STACK or func is _CAT) and torch.is_grad_enabled():
            starts = self._starts(func, *call.args)
            if starts:
                self._unread[torch_private.get_sequence_nr() - 1] = starts
        return True

    def _starts(self, func: Any, tensors: Sequence[Tensor], dimension: int = 0) -> frozenset[int]:
        """The positions in their joined tensor at which stand-ins begin."""
        starts, start = set(), 0
        for tensor in tensors:
            empty = tuple(tensor.shape) == (0,)  # may be joined with tensors of any shape
            size = 1 if func is _STACK else 0 if empty else tensor.shape[dimension]
            if size and id(tensor) in self.detached:
                starts.add(start)
            start += size
        return frozenset(starts)

    def watch(self, root: nn.Module) -> None:
        """Watch the modules that define this tree's classes, and those of functions they import."""
        if not self.enabled:
            return
        kinds = {kind for module in trees.modules_in(root) for kind in type(module).__mro__}
        for kind in kinds:
            for namespace in (
                getattr(sys.modules.get(kind.__module__), "__dict__", {}),
                *(function.__globals__ for function in _functions(vars(kind))),
            ):
                self._watch(namespace)
        for namespace in [*self._namespaces.values()]:
            for function in _functions(namespace):
                if "range" in function.__code__.co_names:
                    self._watch(function.__globals__)

    def _watch(self, namespace: dict[str, Any]) -> None:
        top = str(namespace.get("__name__", "")).partition(".")[0]
        if namespace and top not in _NOT_USERS:
            self._namespaces.setdefault(id(namespace), namespace)

    @contextlib.contextmanager
    def injected(self) -> Iterator[None]:
        """Inside, `range` in the watched modules is ours, except those that define one."""
        scope = Scope.current()
        assert scope is not None
        scope.kept[_NAME] = self
        changed = [space for space in self._namespaces.values() if _inject(space)]
        try:
            yield
        finally:
            for namespace in changed:
                _eject(namespace)
            del scope.kept[_NAME]

    def called(self, values: range, frame: FrameType) -> Any:
        """The result of `range` in the code of this frame."""
        alone = self.tape.threads.own()
        free = self.enabled and self.turn is None and alone and not _transformed()
        if free and values[MIN_TURNS - 1 :]:
            body = bodies_of(frame.f_code).get(frame.f_lineno)
            if body is not None:
                return _Shortened(self, values, body, frame)
        return values


def _functions(namespace: Mapping[str, Any]) -> list[FunctionType]:
    """The functions in a namespace, without their wrappers; a notebook's `open` wraps C code."""
    wrappers = [item for item in [*namespace.values()] if isinstance(item, FunctionType)]
    functions = map(inspect.unwrap, wrappers)
    return [function for function in functions if isinstance(function, FunctionType)]


_NAME = "loops"
"""Under which a scope keeps its `Rolling`."""
_NOT_USERS = frozenset({"builtins", "torch", "rooftrace"})


def _transformed() -> bool:
    """Whether a transform of torch.func runs: its tensors are wrappers."""
    inside: Any = torch_private.peek_interpreter_stack()
    return inside is not None


class _Meta(type):
    """The class of `_Range`: behaves as `range`, except in loops that may be cut short."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        scope = Scope.current()
        rolling = None if scope is None else scope.kept.get(_NAME)
        values = range(*args, **kwargs)
        return values if rolling is None else rolling.called(values, sys._getframe(1))

    def __instancecheck__(cls, item: Any) -> bool:
        return isinstance(item, range)

    def __subclasscheck__(cls, kind: Any) -> bool:
        return issubclass(kind, range)

    def __eq__(cls, other: Any) -> bool:
        return other is range or other is cls

    def __hash__(cls) -> int:
        return hash(range)

    def __getattr__(cls, name: str) -> Any:
        return getattr(range, name)

    def __repr__(cls) -> str:
        return repr(range)


_Range: Any = _Meta("range", (), {})
_LOCK = threading.RLock()
_USERS: Counter[int] = Counter()  # how many recordings watch a namespace that has `_Range`


def _inject(namespace: dict[str, Any]) -> bool:
    """Put `_Range` into the names of a module; False where it defines a `range`."""
    with _LOCK:
        if namespace.setdefault("range", _Range) is not _Range:
            return False
        _USERS[id(namespace)] += 1
        return True


def _eject(namespace: dict[str, Any]) -> None:
    with _LOCK:
        _USERS[id(namespace)] -= 1
        if not _USERS[id(namespace)]:
            del _USERS[id(namespace)]
            if namespace.get("range") is _Range:
                del namespace["range"]
