"""Which answer to a condition goes on, read off bytecode, against Python itself: both are given."""

import sys
from typing import Any

import pytest

from rooftrace.tracer.conditions import answer_that_goes_on, number_that_goes_on

CODE = """
import sys

def checked(x):
    return bool(x)

def stop(code=1):
    print("stopping", file=sys.stderr)
    sys.exit(code)

def refused(x):
    return not x.item()

class Failing:
    def fail(self):
        raise ValueError

def run(x):
    {code}
"""

DECIDED = [
    "assert x",
    "assert not x, f'{x!r}'",
    "assert x.item()",
    "assert checked(x)",
    "if refused(x): raise ValueError",
    "if x: raise ValueError('a' if len('b') else 'c')",
    "if not x: sys.exit(1)",
    "if x:\n        print('stopping', file=sys.stderr)\n        sys.exit(1)",
    "ok = x.item()\n    if not ok: raise ValueError",
    "if x:\n        for i in range(2): len('a')\n        raise ValueError",
    "if not x:\n        with open('/dev/null') as file: raise ValueError(file)",
    "for i in range(3):\n        if x: return i\n    raise ValueError",
    "for i in range(3):\n        if x: break\n    else: raise ValueError",
    "if len('a') and x: raise ValueError",
    "if x is None or x: raise ValueError",
    "assert not any(checked(y) for y in [x, x])",
    "if x:\n        stop(3)",
    "self = Failing()\n    if x: return 1\n    self.fail()",
    "if all(y.item() for y in [x]): raise ValueError",
]
OPEN = [
    "return 1 if x else 2",
    "if x: print(file=sys.stderr)",
    "return 'exit' if x else 2",
    "if x: return 1\n    for i in range(3):\n        if i == 2: return i\n    raise ValueError",
    "if x: raise ValueError\n    raise KeyError",
    "if x:\n        if len('a') > 1: raise ValueError",
    "while True:\n        if x: return 1\n        if x.asked: return 2",
]


class Condition:
    """An unknown condition that answers as it is told, and notes which answer goes on."""

    def __init__(self, answer: bool) -> None:
        self.answer = answer
        self.asked: list[bool | None] = []

    def __bool__(self) -> bool:
        self.asked.append(answer_that_goes_on(sys._getframe(1)))
        return self.answer

    item = __bool__


def ends_well(code: str, answer: bool) -> tuple[bool, list[bool | None]]:
    scope: dict[str, Any] = {}
    exec(compile(CODE.format(code=code), "conditions.py", "exec"), scope)
    condition = Condition(answer)
    try:
        scope["run"](condition)
    except (ValueError, AssertionError, KeyError, SystemExit):
        return False, condition.asked
    return True, condition.asked


@pytest.mark.parametrize("code", DECIDED)
def test_the_answer_that_goes_on_is_the_one_that_python_goes_on_with(code: str) -> None:
    for answer in (True, False):
        well, asked = ends_well(code, answer)
        assert asked[-1] is (answer if well else not answer)


@pytest.mark.parametrize(
    "code",
    [
        "assert x.item() < 1e-3",
        "assert not x.item() > 0",
        "limit = -5\n    if x.item() > limit: raise ValueError",
        "limit = 20\n    n = x.item()\n    if n <= limit: sys.exit(1)",
        "assert x.item() == 7",
        "if x.item() != 7: raise ValueError",
    ],
)
def test_a_number_is_one_that_python_goes_on_with(code: str) -> None:
    asked: list[float | None] = []

    class Number:
        def item(self) -> float:
            number = number_that_goes_on(sys._getframe(1), 1.0, whole=True)
            asked.append(number)
            return 1.0 if number is None else number

    scope: dict[str, Any] = {}
    exec(compile(CODE.format(code=code), "conditions.py", "exec"), scope)
    scope["run"](Number())
    assert asked[0] is not None and asked[0] % 1 == 0
    exec(
        compile(CODE.format(code="assert x.item() >= 1; return x.item() < 1"), "c.py", "exec"),
        scope,
    )
    asked.clear()
    assert not scope["run"](Number()) and asked == [None, None]
    exec(compile(CODE.format(code="return x.item()"), "returned.py", "exec"), scope)
    assert scope["run"](Number()) == 1


@pytest.mark.parametrize("code", OPEN)
def test_no_answer_is_needed_where_both_go_on_or_neither_does(code: str) -> None:
    results = [ends_well(code, answer) for answer in (True, False)]
    assert all(asked[0] is None for _, asked in results)
    assert len({well for well, _ in results}) == 1
