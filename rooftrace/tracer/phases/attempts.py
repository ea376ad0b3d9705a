"""Attempts to run code under a recorder: unknown conditions are flipped until it runs."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Mapping

from rooftrace.errors import RequestError
from rooftrace.tracer.asking import Options, assumptions
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.lower import NotAlikeError
from rooftrace.tracer.recording import Recorder
from rooftrace.tracer.replay import UnlikeLayersError
from rooftrace.tracer.source import TraceError, users_traceback
from rooftrace.tracer.values import UnknownValueError, Values

MAX_BRANCH_RETRIES = 6
"""How many unknown conditions of one source line are turned one by one."""
MAX_LINES = 64
"""How many source lines may have their unknown conditions turned."""
UNKNOWN_NUMBERS = (1, 0)
"""Values tried in turn for an unknown number, until the code runs."""
_DECIDED = frozenset({"branch", "density", "value"})
"""Kinds of assumptions that a user can decide."""


class OwnBackwardError(RequestError):
    """Code calls backward itself in a phase that runs it without gradients."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} runs without gradients, and its code calls backward: trace its call as the "
            "step that it is, rooftrace.trace(lambda module, x: module(x), module, x), or a "
            "function without a phase"
        )


def attempted(
    run: Callable[[Recorder], OpGraph], options: Options, what: str, root: str
) -> OpGraph:
    """Call `run` under a recorder; after a failure, again with the last unknown condition flipped.

    A check of arguments stands in one line and may run many times, so all conditions of a line are
    flipped together first, and one by one if that fails too.  If neither helps and a number was
    unknown, the last attempt takes that number as zero.
    what, root: a name for the code, and the class of its module, for the message of the TraceError.
    """
    first: TraceError | None = None
    repeats = options.repeats
    apart: set[str] = set()  # paths of layers of which each is run, also under gradients
    for number in UNKNOWN_NUMBERS:
        turns = _Turns(options.branches)
        while True:
            values = Values(
                branches=turns.branches,
                assume=options.assume,
                number=number,
                turned=turns.lines,
            )
            values.by_number = bool(options.branches)
            recorder = Recorder(
                values,
                roll_loops=repeats,
                repeat_calls=repeats,
                run_apart=apart,
                release=options.release,
            )
            try:
                graph = run(recorder)
                assumptions.check_histograms(options.assume, (a.facts for a in values.assumptions))
                return graph
            except RequestError:
                raise
            except UnlikeLayersError as error:  # all of them, if a second one is not alike
                assert error.path not in apart
                apart = {*apart, "" if apart else error.path}
            except NotAlikeError as error:  # what was left out has to be run after all
                assert repeats, error
                repeats = False
            except Exception as error:  # whatever a user's module may raise
                if recorder.here.wants_gradients:
                    raise OwnBackwardError(what) from error
                first = first or _explained(error, recorder, what, root)
                first.__cause__ = first.__cause__ or error
                if not turns.turn(values):
                    break
            finally:
                recorder.close()
                stopped = isinstance(sys.exc_info()[1], KeyboardInterrupt)  # who stops is not kept
                with contextlib.suppress(AttributeError):  # what is private may go away
                    if not stopped:
                        recorder.forget()
        if "value" in options.assume or all(a.kind != "value" for a in values.assumptions):
            break
    assert first is not None
    raise first from first.__cause__


class _Turns:
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


def _explained(error: Exception, recorder: Recorder, what: str, root: str) -> TraceError:
    """A TraceError with the traceback, shortened to the user's code, and the module that failed."""
    path, kind = recorder.failed_in or ("", root)
    where = f"module {path!r} ({kind})" if path else f"module {kind}"
    failed = recorder.failed_op
    if failed is not None and failed[0] is error:
        where += f" at {failed[1]}"
    lines = [
        f"{what} failed in {where}: {type(error).__name__}: {error}",
        users_traceback(error),
    ]
    asked = [a for a in recorder.values.assumptions if a.kind in _DECIDED]
    for item in list({(a.kind, a.where): a for a in asked}.values())[-3:]:
        place = f"{item.kind}@{item.where}" if item.where else item.kind
        other = str(not item.value).lower() if item.kind == "branch" else "NUMBER"
        lines.append(f"{item.text}; --assume {place}={other} takes it otherwise.")
    if isinstance(error, UnknownValueError):
        lines.append(
            "Its code needs a value that only real weights give; pass inputs that avoid that path."
        )
    else:
        lines.append(
            "If the module runs on real tensors of these shapes, this is a bug of rooftrace: "
            "please report it. Otherwise pass inputs that it accepts (in code, or with --input "
            "NAME=SHAPE:DTYPE)."
        )
    return TraceError("\n".join(line for line in lines if line))
