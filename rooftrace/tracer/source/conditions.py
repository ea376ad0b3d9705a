"""What Python code does with the answer to a condition, read off its bytecode.

It knows jumps, raises and exits of Python 3.10 to 3.14.  It does not know which errors are caught.
"""

from __future__ import annotations

import dis
from bisect import bisect_right
from functools import lru_cache
from types import CodeType, FrameType

_ASKING = ("CALL", "COMPARE_OP", "CONTAINS_OP", "TO_BOOL", "UNARY_NOT")
"""Instructions other than jumps that ask for a condition; a call may return it."""
_FILLERS = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "NOT_TAKEN", "TO_BOOL"})
_RAISING = frozenset({"RAISE_VARARGS", "RERAISE"})
_EXITS = frozenset({"exit", "_exit", "quit"})
"""Functions of Python that end the program."""
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_FARTHEST = 200
"""How many blocks of code are looked at behind a condition."""


def answer_that_goes_on(frame: FrameType | None) -> bool | None:
    """The answer with which code goes on that fails with the other one, as `assert` and `if` do.

    frame: it asks for a condition.  Where it returns the answer, its callers decide.  None where
    code goes on with both answers, or with none.
    """
    negated = False
    while frame is not None:
        steps = _steps(frame.f_code)
        at, flips = _use(frame.f_code, frame.f_lasti)
        negated ^= flips
        if at is None:
            return None
        if "_IF_" in steps[at].opname:
            true = _goes_on_with(frame.f_code, at)
            return true if true is None else true != negated
        frame = frame.f_back
    return None


@lru_cache(maxsize=1024)
def _steps(code: CodeType) -> tuple[dis.Instruction, ...]:
    return tuple(dis.get_instructions(code))


def _at(steps: tuple[dis.Instruction, ...], place: int) -> int:
    """The instruction at a byte, which may be that of its caches."""
    return bisect_right([step.offset for step in steps], place) - 1


@lru_cache(maxsize=4096)
def _use(code: CodeType, place: int) -> tuple[int | None, bool]:
    """The jump or return that takes an answer, and whether it takes `not` of it.  None: another
    instruction takes it."""
    steps = _steps(code)
    at, flips = _at(steps, place), False
    returned = "YIELD_VALUE" if code.co_name == "<genexpr>" else "RETURN_VALUE"  # as all() asks for
    if steps[at].opname.startswith(_ASKING) and steps[at].opname != "UNARY_NOT":
        flips = steps[at].opname == "CONTAINS_OP" and steps[at].arg == 1  # `not in`
        at += 1
    while at < len(steps):
        step = steps[at]
        if step.opname.partition("_IF_")[2][:4] in ("TRUE", "FALS") or step.opname == returned:
            return at, flips
        if step.opname == "UNARY_NOT":
            flips = not flips
        elif _kept(steps, at):  # in a variable that is read at once
            at += 1
        elif step.opname not in _FILLERS and step.argval != (step.argval,) * 2:
            return None, flips
        at += 1
    return None, flips


def _kept(steps: tuple[dis.Instruction, ...], at: int) -> bool:
    """Whether a step writes a variable that the next one reads."""
    return (
        steps[at].opname.startswith("STORE_")
        and at + 1 < len(steps)
        and steps[at + 1].opname.startswith("LOAD_")
        and steps[at].argval == steps[at + 1].argval
    )


@lru_cache(maxsize=4096)
def _goes_on_with(code: CodeType, at: int) -> bool | None:
    """The answer with which a conditional jump goes on and fails with the other; None for none."""
    steps = _steps(code)
    jumped, passed = (_fails(steps, {}, way) for way in (_target(steps, at), at + 1))
    return None if jumped == passed else ("_IF_TRUE" in steps[at].opname) != jumped


def _target(steps: tuple[dis.Instruction, ...], at: int) -> int:
    """The step to which one jumps; itself where it does not."""
    return _at(steps, steps[at].argval) if steps[at].opcode in _JUMPS else at


def _fails(steps: tuple[dis.Instruction, ...], seen: dict[int, bool], first: int) -> bool:
    """Whether all that may come from a step on raises an error or exits.

    seen: what is known of steps at which a block begins; it is added to.  A `for` is taken to end,
    a `while` is not.
    """
    if first in seen or len(seen) > _FARTHEST:
        return seen.get(first, False)
    seen[first], at = True, first  # where code comes back to itself, its other ways decide
    ways: tuple[int | None, ...] = ()
    while at < len(steps) and not ways:
        name, target = steps[at].opname, _target(steps, at)
        if name in _RAISING or (name.startswith("LOAD_") and steps[at].argval in _EXITS):
            return True
        if "_IF_" in name or name == "FOR_ITER":
            ways = (target, at + 1) if target > at else (None,)
        elif name.startswith(("RETURN", "YIELD", "SEND")) or target < at:
            looped = target < at and steps[target].opname == "FOR_ITER"
            ways = (_target(steps, target) if looped else None,)
        else:
            at = target if "JUMP" in name else at + 1
    seen[first] = bool(ways) and all(w is not None and _fails(steps, seen, w) for w in ways)
    return seen[first]
