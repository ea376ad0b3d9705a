"""Which unknown conditions go the other way, after code that was run by the usual ones failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rooftrace.tracer.values.values import Values

MAX_BRANCH_RETRIES = 6
"""How many unknown conditions of one source line are turned one by one."""
MAX_LINES = 64
"""How many source lines may have their unknown conditions turned."""


class Turns:
    """The unknown conditions to flip, learnt from attempts that failed.

    lines: source lines, all conditions of each.  branches: single conditions, by their number.
    """

    def __init__(self, branches: Mapping[int, bool]) -> None:
        self.branches, self.lines = dict(branches), set[str]()
        self._first: dict[str, int] = {}  # the condition with which a line was turned
        self._single: Counter[str] = Counter()

    def turn(self, values: Values) -> bool:
        """Flip the last condition of an attempt that failed; False if nothing is left to try."""
        last, line = values.decisions - 1, values.last_line
        if last < 0 or values.decided or len(self._first) > MAX_LINES:
            return False
        if line and line not in self._first:
            self._first[line] = last
            self.lines.add(line)
            return True
        if line in self.lines:  # it fails either way as a whole
            self.lines.discard(line)
            last = self._first[line]
        if last in self.branches or self._single[line] == MAX_BRANCH_RETRIES:
            return False
        self._single[line] += 1
        self.branches[last] = True
        return True
