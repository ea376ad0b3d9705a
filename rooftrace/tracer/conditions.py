"""Bytecode analysis of the answers with which code goes on, and import finders."""

from __future__ import annotations

import dis
import operator
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.machinery import ModuleSpec
from inspect import getattr_static
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

# -- import finders --------------------------------------------------------------------------------
# Import finders that come before others and change the specs that these return.


def spec_after(
    finder: Any, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
) -> ModuleSpec | None:
    """The spec that the finders after `finder` on `sys.meta_path` return for a module, or None.

    Finders before it are not asked: they may be asking it, which would not end.
    """
    finders = list(sys.meta_path)
    for other in finders[finders.index(finder) + 1 :] if finder in finders else ():
        find = getattr(other, "find_spec", None)
        spec: ModuleSpec | None = None if find is None else find(name, path, target)
        if spec is not None:
            return spec
    return None


# -- conditions ------------------------------------------------------------------------------------
# What Python code does with the answer to a condition, read off its bytecode.
#
# It knows jumps, raises and exits of Python 3.10 to 3.14.  It does not know which errors are
# caught.

_ASKING = ("CALL", "COMPARE_OP", "CONTAINS_OP", "TO_BOOL", "UNARY_NOT")
"""Instructions other than jumps that ask for a condition; a call may return it."""
_FILLERS = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "NOT_TAKEN", "TO_BOOL"})
_RAISING = frozenset({"RAISE_VARARGS", "RERAISE"})
_NAMING = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD"})
_EXITS = frozenset({"exit", "_exit", "quit"})
"""Functions of Python that end the program."""
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_FARTHEST = 200
"""How many blocks of code are looked at behind a condition."""


def answer_that_goes_on(frame: FrameType | None, place: int | None = None) -> bool | None:
    """The answer with which code goes on that fails with the other one, as `assert` and `if` do.

    frame: it asks for a condition, at the byte `place`, by default where it is.  Where it returns
    the answer, its callers decide.  None where code goes on with both answers, or with none.
    """
    negated = False
    while frame is not None:
        steps = _steps(frame.f_code)
        at, flips = _use(frame.f_code, frame.f_lasti if place is None else place)
        negated, place = negated ^ flips, None
        if at is None:
            return None
        if "_IF_" in steps[at].opname:
            true = _goes_on_with(frame.f_code, at, _endings(frame))
            return true if true is None else true != negated
        frame = frame.f_back
    return None


def number_that_goes_on(frame: FrameType | None, usual: float, whole: bool) -> float | None:
    """A number with which code goes on that fails with the usual one, as it compares it with
    another; None where it does not fail, or no such number is near.

    frame: it calls for the number.  whole: the number is an integer.
    """
    if frame is None:
        return None
    steps = _steps(frame.f_code)
    at = _following(steps, _at(steps, frame.f_lasti))
    compared = _following(steps, at)
    if compared == len(steps):  # the number is returned
        return None
    other = _number(frame, steps[at])
    holds = _COMPARISONS.get(steps[compared].argval)
    if other is None or holds is None or steps[compared].opname != "COMPARE_OP":
        return None
    needed = answer_that_goes_on(frame, steps[compared].offset)
    if needed is None or holds(usual, other) == needed:
        return None
    tried = (number for number in (0, other, other + 1, other - 1) if not whole or number % 1 == 0)
    return next((number for number in tried if holds(number, other) == needed), None)


def comes_back(frame: FrameType | None) -> bool:
    """Whether the loop that a frame is in goes on with either answer to the condition for which it
    asks."""
    if frame is None:
        return False
    steps = _steps(frame.f_code)
    at, _ = _use(frame.f_code, frame.f_lasti)
    if at is None or "_IF_" not in steps[at].opname:
        return False
    ends = ((_target(steps, end), end) for end in range(at, len(steps)))
    head = max((begin for begin, end in ends if begin <= at and begin < end), default=None)
    return head is not None and all(
        _reaches(steps, way, head) for way in (_target(steps, at), at + 1)
    )


def _reaches(steps: tuple[dis.Instruction, ...], first: int, head: int) -> bool:
    """Whether code may come from a step to the end of the loop that begins at another."""
    waiting, seen = [first], set[int]()
    while waiting:
        at = waiting.pop()
        name, target = steps[at].opname, _target(steps, at)
        if target < at and target == head:
            return True
        if at in seen or name in _RAISING or name.startswith("RETURN"):
            continue
        seen.add(at)
        if target > at:
            waiting.append(target)
        if "_IF_" in name or name == "FOR_ITER" or "JUMP" not in name:
            waiting += [at + 1] * (at + 1 < len(steps))
    return False


_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "==": operator.eq, "!=": operator.ne,
}  # fmt: skip


def _number(frame: FrameType, step: dis.Instruction) -> float | None:
    """The number that a step loads, a constant or a variable; None for other values."""
    loaded = step.argval
    if step.opname not in ("LOAD_CONST", "LOAD_SMALL_INT"):
        named = step.opname.startswith("LOAD_") and "ATTR" not in step.opname
        loaded = {**frame.f_globals, **frame.f_locals}.get(loaded) if named else None
    return loaded if isinstance(loaded, int | float) else None


def _endings(frame: FrameType) -> frozenset[str]:
    """Names of functions, and of methods of `self`, with which code ends: they raise or exit."""
    own = type(frame.f_locals.get("self"))
    named = {name: getattr_static(own, name, None) for name in frame.f_code.co_names}
    named |= {name: frame.f_globals[name] for name in named if name in frame.f_globals}
    return _EXITS.union(
        name for name, f in named.items() if isinstance(f, FunctionType) and _ends(f.__code__)
    )


@lru_cache(maxsize=1024)
def _ends(code: CodeType) -> bool:
    return _fails(_steps(code), _EXITS, {}, 0)


@lru_cache(maxsize=1024)
def _steps(code: CodeType) -> tuple[dis.Instruction, ...]:
    return tuple(part for step in dis.get_instructions(code) for part in _parts(step))


def _parts(step: dis.Instruction) -> tuple[dis.Instruction, ...]:
    """An instruction; two for one that loads or stores two variables, as Python 3.13 has them."""
    if "FAST" not in step.opname or not isinstance(step.argval, tuple):
        return (step,)
    first = "LOAD_FAST" if step.opname.startswith("LOAD") else "STORE_FAST"
    second = "STORE_FAST" if step.opname.endswith("STORE_FAST") else "LOAD_FAST"
    names = zip((first, second), step.argval, strict=True)
    return tuple(step._replace(opname=name, argval=argument) for name, argument in names)


def _at(steps: tuple[dis.Instruction, ...], place: int) -> int:
    """The instruction at a byte, which may be that of its caches."""
    return bisect_right(steps, place, key=operator.attrgetter("offset")) - 1


@lru_cache(maxsize=4096)
def _use(code: CodeType, place: int) -> tuple[int | None, bool]:
    """The jump or return that takes an answer, and whether it takes `not` of it.  None: another
    instruction takes it."""
    steps = _steps(code)
    at, flips = _at(steps, place), False
    returned = "YIELD_VALUE" if code.co_name == "<genexpr>" else "RETURN_VALUE"  # as all() asks for
    if steps[at].opname.startswith(_ASKING) and steps[at].opname != "UNARY_NOT":
        flips = steps[at].opname == "CONTAINS_OP" and steps[at].arg == 1  # `not in`
        at = _following(steps, at)
    while steps[at].opname == "UNARY_NOT":
        at, flips = _following(steps, at), not flips
    name = steps[at].opname
    used = "_IF_TRUE" in name or "_IF_FALSE" in name or name == returned
    return at if used else None, flips


def _following(steps: tuple[dis.Instruction, ...], at: int) -> int:
    """The next step that does something, to the value that is there.

    Nothing is done to one that is written to a variable which the next step reads.
    """
    at += 1
    while at < len(steps) - 1:
        name, argument, after = steps[at].opname, steps[at].argval, steps[at + 1]
        kept = name.startswith("STORE_") and argument == after.argval
        kept = kept and after.opname.startswith("LOAD_")
        at += kept
        if not kept and name not in _FILLERS:
            return at
        at += 1
    return at


@lru_cache(maxsize=4096)
def _goes_on_with(code: CodeType, at: int, endings: frozenset[str]) -> bool | None:
    """The answer with which a conditional jump goes on and fails with the other; None for none."""
    steps = _steps(code)
    jumped, passed = (_fails(steps, endings, {}, way) for way in (_target(steps, at), at + 1))
    return None if jumped == passed else ("_IF_TRUE" in steps[at].opname) != jumped


def _target(steps: tuple[dis.Instruction, ...], at: int) -> int:
    """The step to which one jumps; itself where it does not."""
    return _at(steps, steps[at].argval) if steps[at].opcode in _JUMPS else at


def _fails(
    steps: tuple[dis.Instruction, ...], endings: frozenset[str], seen: dict[int, bool], first: int
) -> bool:
    """Whether all that may come from a step on raises an error or exits.

    endings: names of functions that do.  seen: what is known of steps at which a block begins; it
    is added to.  A `for` is taken to end, a `while` is not.
    """
    if first in seen or len(seen) > _FARTHEST:
        return seen.get(first, False)
    seen[first], at = True, first  # where code comes back to itself, its other ways decide
    ways: tuple[int | None, ...] = ()
    while at < len(steps) and not ways:
        name, target = steps[at].opname, _target(steps, at)
        if name in _RAISING or (name in _NAMING and steps[at].argval in endings):
            return True
        if "_IF_" in name or name == "FOR_ITER":
            ways = (target, at + 1) if target > at else (None,)
        elif name.startswith(("RETURN", "YIELD", "SEND")) or target < at:
            looped = target < at and steps[target].opname == "FOR_ITER"
            ways = (_target(steps, target) if looped else None,)
        else:
            at = target if "JUMP" in name else at + 1
    seen[first] = bool(ways) and all(
        w is not None and _fails(steps, endings, seen, w) for w in ways
    )
    return seen[first]
