"""Functions that Dynamo compiles in a run, reasons of graph breaks, and the reset of its state."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

from torch import Tensor, nn

from rooftrace.graph import pattern_of
from rooftrace.studies.breaks import placing
from rooftrace.tracer import source as lines, torch_private
from rooftrace.tracer.recording import original_of, overrides, replaced
from rooftrace.tracer.values import trees

# -- state -----------------------------------------------------------------------------------------
# What Dynamo keeps for the whole process, as it was before a run of ours.
#
# Compiled code is kept with each function's code object, for every caller in the process.  What a
# run of ours adds is taken out again; what others compiled stays.

_CONTAINERS = (
    ("dynamo_utils", "counters"),
    ("dynamo_utils", "graph_break_reasons"),
    ("dynamo_utils", "guard_failures"),
    ("dynamo_utils", "warn_once_cache"),
    ("dynamo_utils", "_compilation_metrics"),
    ("dynamo_utils", "compilation_time_metrics"),
    ("convert_frame", "FRAME_COMPILE_COUNTER"),
)
_NUMBERS = (
    ("convert_frame", "FRAME_COUNTER"),
    ("convert_frame", "initial_global_state"),
    ("dynamo_utils", "curr_frame"),
)
_TRACKERS = ("input_codes", "output_codes")
OURS = "of_rooftrace"
"""The attribute by which a backend is known to be that of a run of ours."""


class Touched:
    """Functions that Dynamo was asked to compile in a run of ours, each as it was before."""

    def __init__(self) -> None:
        self._before: dict[CodeType, tuple[bool, dict[str, Any], dict[str, Any]]] = {}

    def note(self, code: CodeType, sizes: dict[str, Any]) -> None:
        """Dynamo is about to compile a function.  sizes: what it remembers of its arguments."""
        if code not in self._before:
            known = bool(_entries(code))
            self._before[code] = known, sizes, dict(sizes) if sizes else {}

    def take_out(self) -> None:
        """Take out what was compiled and remembered since."""

        action = torch_private.FrameAction.DEFAULT
        for code, (known, sizes, were) in self._before.items():
            if not known:
                torch_private.reset_code(code)
                continue
            for entry in _entries(code):
                manager = entry.guard_manager
                if _is_ours(entry.backend) and manager.extra_state is not None:
                    gone = torch_private.DeletedGuardManagerWrapper("a run of rooftrace has ended")
                    manager.extra_state.invalidate(entry, gone)
            sizes.clear()
            sizes.update(were)
            # Code that was not to be compiled before does not come here.
            torch_private.set_code_exec_strategy(
                code, torch_private.FrameExecStrategy(action, action)
            )


def _entries(code: CodeType) -> list[Any]:
    return list(torch_private.cache_entries(code))


@contextlib.contextmanager
def kept(touched: Touched) -> Iterator[None]:
    """Inside, Dynamo may compile; afterwards the process is as before.

    touched: what it was asked to compile, which the caller notes meanwhile.
    """

    homes = {home: getattr(torch_private, home) for home, _ in (*_CONTAINERS, *_NUMBERS)}
    containers = [
        (held, _copied(held))
        for home, name in _CONTAINERS
        if (held := getattr(homes[home], name, None)) is not None
    ]
    numbers = [
        (homes[home], name, getattr(homes[home], name))
        for home, name in _NUMBERS
        if hasattr(homes[home], name)
    ]
    frames = torch_private.convert_frame
    held_codes: list[Any] = [getattr(frames, name) for name in _TRACKERS if hasattr(frames, name)]
    trackers = [(tracker, list(tracker.seen), set(tracker.seen_ids)) for tracker in held_codes]
    with _quiet():
        try:
            yield
        finally:
            touched.take_out()
            for held, was in containers:
                _restore(held, was)
            for home, name, value in numbers:
                setattr(home, name, value)
            for tracker, seen, ids in trackers:
                tracker.seen[:], tracker.seen_ids = seen, ids


def _copied(held: Any) -> Any:
    if isinstance(held, dict):
        return {
            key: value.copy() if isinstance(value, (dict, list)) else value
            for key, value in held.items()
        }
    return list(held)


def _restore(held: Any, was: Any) -> None:
    held.clear()
    if hasattr(held, "extend"):
        held.extend(was)
    else:
        held.update(was)


def _is_ours(backend: Any) -> bool:
    while backend is not None:
        if getattr(backend, OURS, False):
            return True
        backend = getattr(backend, "_torchdynamo_orig_backend", None)
    return False


class _NotHere(logging.Filter):
    """Leaves out what Dynamo logs in one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread != self.thread or not record.name.startswith(torch_private.DYNAMO)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Inside, what Dynamo logs in this thread is not shown: the result says it."""
    named = (torch_private.DYNAMO, "torch", None)
    handlers = [handler for name in named for handler in logging.getLogger(name).handlers]
    if logging.lastResort is not None:
        handlers.append(logging.lastResort)
    leave_out = _NotHere()
    for handler in handlers:
        handler.addFilter(leave_out)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(leave_out)


# -- functions -------------------------------------------------------------------------------------
# Functions that Dynamo is asked to compile in a run: what it makes of each, and why it stops.

_RESUMED = "torch_dynamo_resume_in_"
UNKNOWN = "Dynamo does not compile the function, and gives no reason"
_SKIPPED = 1 << 20
"""Stands for the depth of what has a whole function skipped."""


@dataclass(slots=True)
class _Function:
    """One function that Dynamo was asked to compile, for one kind of caller."""

    code: CodeType
    path: str  # of the module whose method it is; "" for none
    breaks: list[Any] = field(default_factory=list)  # reasons for which graphs of it ended
    cause: int = -1  # why it does not run to its end in one graph


class DynamoFunctions:
    """The functions of one run, and the causes by which their graphs end."""

    def __init__(self, root: nn.Module) -> None:
        self.touched = Touched()
        self.causes: list[placing.Cause] = []
        self._nearest: list[int] = []  # by cause: how deep it is below the function that it cuts
        self._paths = {id(module): trees.shown_path(path) for path, module in root.named_modules()}
        self._compiling: list[_Function] = []
        self._generated: dict[CodeType, _Function] = {}
        self._skipped: dict[CodeType, int] = {}
        self._through: dict[tuple[str, int], int] = {}  # by line that calls what breaks: the cause
        self._left: set[CodeType] = set()  # functions that were not compiled, without a reason
        # By cause, and how deep below a function it is: the last frame of it, and how many.
        self._happened: dict[tuple[int, int], tuple[Any, int]] = {}

    def caller(self, frame: Any) -> Any:
        """The frame that called the compiled function which runs in a frame; None for none."""
        while frame is not None and frame.f_code not in self._generated:
            frame = frame.f_back
        return None if frame is None else frame.f_back

    def told(self) -> tuple[placing.Cause, ...]:
        """The causes, each with how often it happened."""
        causes = [
            replace(cause, times=self._times(place)) for place, cause in enumerate(self.causes)
        ]
        self._happened.clear()
        return tuple(causes)

    # -- running -----------------------------------------------------------------------------------

    def why(self, frame: Any) -> tuple[int, int]:
        """The cause of what runs in a frame: of the innermost function that is cut or skipped.

        Of a function that is compiled too often, also why it is compiled on its own; else -1.
        """
        limit, left = -1, None
        while frame is not None:
            function = self._generated.get(frame.f_code)
            cause = self._skipped.get(frame.f_code, -1) if function is None else function.cause
            if cause >= 0 and cause != limit:
                self._happens(cause, _SKIPPED if function is None else _depth(function), frame)
                if self.causes[cause].kind != placing.LIMIT or limit >= 0:
                    return (cause, -1) if limit < 0 else (limit, cause)
                limit = cause
            if left is None and frame.f_code in self._left:
                left = frame
            frame = frame.f_back
        if limit < 0 and left is not None:
            limit = self._leaves(left)
        return limit, -1

    def _leaves(self, frame: Any) -> int:
        """The cause that stands for a function that is not compiled for a reason not known."""
        code = frame.f_code
        stack = [traceback.FrameSummary(code.co_filename, code.co_firstlineno, code.co_name)]
        cause = self._cause(placing.SKIP, UNKNOWN, stack, self._path_of(frame))
        self._happens(cause, _SKIPPED, frame)
        return cause

    def _happens(self, cause: int, depth: int, frame: Any) -> None:
        """Count a cause, once for each run of a function that is cut or skipped."""
        last, times = self._happened.get((cause, depth), (None, 0))
        if last is not frame:
            self._happened[cause, depth] = frame, times + 1

    def _times(self, cause: int) -> int:
        """How often a cause cut the function next to it, or else had one skipped."""
        depths = sorted(depth for other, depth in self._happened if other == cause)
        return self._happened[cause, depths[0]][1] if depths else 1

    # -- compiling ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Inside, functions that Dynamo is asked to compile in this thread are noted."""

        home = torch_private.ConvertFrameAssert
        convert = original_of(home, "__call__")

        def noted(
            own: Any, frame: Any, entry: Any, hooks: Any, sizes: Any, *args: Any, **kwargs: Any
        ) -> Any:
            self.touched.note(frame.f_code, sizes)
            function = _Function(frame.f_code, self._path_of(frame))
            known = len(torch_private.graph_break_reasons)
            self._compiling.append(function)
            try:
                result = convert(own, frame, entry, hooks, sizes, *args, **kwargs)
                if getattr(result, "guarded_code", None) is None:
                    self._left.add(frame.f_code)
                return result
            except torch_private.Unsupported as error:
                self._skipped[frame.f_code] = self._skip(function, error)
                raise
            finally:
                self._compiling.pop()
                function.breaks = torch_private.graph_break_reasons[known:]
                self._cut(function)

        def made(code: CodeType, new_code: CodeType) -> CodeType | None:
            if self._compiling:
                self._generated[new_code] = self._compiling[-1]
            return None

        hook = torch_private.register_bytecode_hook(made)
        try:
            with (
                replaced(home, {"__call__": noted}),
                replaced(torch_private.dynamo_utils, {"run_node": _run_on_fakes}),
            ):
                yield
        finally:
            hook.remove()

    def _path_of(self, frame: Any) -> str:
        """The path of the module whose method a frame runs; "" for none."""
        code = frame.f_code
        first = code.co_varnames[0] if code.co_argcount else ""
        own = frame.f_locals.get("self", frame.f_locals.get(first))
        return self._paths.get(id(own), "")

    def _cut(self, function: _Function) -> None:
        """Note why the graph of a function ends before the function does.

        Of a line at which Dynamo cannot go on it gives no reason.  Where the line calls what was
        found to break a caller of the function, that is the reason.
        """
        if function.breaks:
            reason = function.breaks[-1]
            places = [(frame.filename, frame.lineno) for frame in reason.user_stack]
            if reason.reason == NO_REASON and places and places[-1] in self._through:
                function.cause = self._through[places[-1]]
                return
            function.cause = self._cause(
                placing.BREAK, reason.reason, reason.user_stack, function.path
            )
            self._through |= dict.fromkeys(places[:-1], function.cause)

    def _skip(self, function: _Function, error: Any) -> int:
        """Note why a function is not compiled."""
        text = str(error)
        code = function.code
        stack = list(getattr(error, "real_stack", None) or ())
        limit = "recompile limit" in text.partition("\n")[0]
        if limit or not stack:
            stack = [traceback.FrameSummary(code.co_filename, code.co_firstlineno, code.co_name)]
        kind = placing.LIMIT if limit else placing.SKIP
        return self._cause(kind, text, stack, function.path)

    def _cause(self, kind: str, text: str, stack: Sequence[Any], path: str) -> int:
        source = lines.users_line([(frame.filename, frame.lineno or 0) for frame in stack])
        if not source and stack:  # in code of torch
            source = f"{stack[-1].filename}:{stack[-1].lineno}"
        made = placing.Cause(
            kind, plain_reason(text), source, pattern_of(path), text.strip(), hints_of(text)
        )
        for place, known in enumerate(self.causes):
            if known.key == made.key:
                stronger = made.kind == placing.BREAK != known.kind
                kept = replace(known, kind=made.kind) if stronger else known
                if len(stack) < self._nearest[place]:  # a function nearer to the line
                    self._nearest[place] = len(stack)
                    kept = replace(kept, module=made.module)
                self.causes[place] = kept
                return place
        self.causes.append(made)
        self._nearest.append(len(stack))
        return len(self.causes) - 1

    def recompiled(self) -> Iterator[placing.Recompiled]:
        """Functions that were compiled more than once."""

        counts = Counter(function.code for function in self._generated.values())
        for code, times in counts.items():
            if times > 1 and not code.co_name.startswith(_RESUMED):
                reasons = [str(reason) for reason in torch_private.guard_failures.get(code, ())]
                source = lines.users_line([(code.co_filename, code.co_firstlineno)])
                reason = guard_words(reasons[-1]) if reasons else ""
                yield placing.Recompiled(source, code.co_name, times, reason)


def _run_on_fakes(*args: Any, **kwargs: Any) -> Any:
    """The function by which Dynamo runs a node of its graph; the result is of fake tensors.

    Torch makes a fake tensor of what `torch.tensor` makes on the CPU, and forgets it on meta.
    """
    result = original_of(torch_private.dynamo_utils, "run_node")(*args, **kwargs)
    mode = overrides.fake_mode()
    if mode is None:
        return result

    def faked(tensor: Tensor) -> Any:
        return mode.from_tensor(tensor) if type(tensor) is Tensor and tensor.is_meta else tensor

    return torch_private.tree_map_only(Tensor, faked, result)


def _depth(function: _Function) -> int:
    """How deep in calls of a function its break is: 1 in its own lines."""
    return len(function.breaks[-1].user_stack) if function.breaks else _SKIPPED


# -- reasons ---------------------------------------------------------------------------------------
# What Dynamo says of a graph break, in plain words.


NO_REASON = "step_unsupported"
"""Dynamo's reason for a graph that ends at a line because it cannot go on."""
_PLAIN: tuple[tuple[str, str], ...] = (
    (r"generic_jump|Data-dependent branching", "if or while asks for the value of a tensor"),
    (r"Unsupported Tensor\.item\(\)", "item() takes a number out of a tensor"),
    (r"Call to `torch\._dynamo\.graph_break\(\)`", "torch._dynamo.graph_break() is called"),
    (
        r"Skip calling `torch\.compiler\.disable\(\)`d function",
        "the function is marked with torch.compiler.disable",
    ),
    (r"graph break in loop|for/while loop", "a break inside a for or while loop"),
    (NO_REASON, "Dynamo cannot go on at this line"),
    (r"Dynamo recompile limit exceeded", "compiled as often as torch._dynamo.config allows"),
)
_ARGUMENTS = re.compile(r" with argument types .*$")
_GUARD = re.compile(r"^\s*(?:\d+/\d+:\s*)?(.*?)\s*(?:\s#.*|\(HINT.*)?$")
_EXPLANATION = re.compile(r"^\s*Explanation:\s*(.*?)\s*$", re.MULTILINE)
_HINT = re.compile(r"^\s*Hint:\s*(.*?)\s*$", re.MULTILINE)
_MORE = "\n*** While handling this graph break"
_OWN_HINTS = ("Please report an issue", "It may be possible to write")
_LONGEST = 200


def plain_reason(text: str) -> str:
    """One sentence on why a graph ends, from the message of Dynamo."""
    first = text.partition(_MORE)[0]
    headline = first.strip().partition("\n")[0].rstrip(".:")
    for pattern, words in _PLAIN:
        if re.search(pattern, headline):
            return words
    explained = _EXPLANATION.search(first)
    sentence = (explained.group(1) if explained else "").partition(". ")[0].rstrip(".")
    sentence = _ARGUMENTS.sub("", sentence)
    shown = sentence or headline or "no reason is given"
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 1]}…"


def hints_of(text: str) -> tuple[str, ...]:
    """Hints of the message, each once; without the advice to report it."""
    hints = _HINT.findall(text.partition(_MORE)[0])
    return tuple(dict.fromkeys(hint for hint in hints if not hint.startswith(_OWN_HINTS)))


def guard_words(text: str) -> str:
    """The difference that a guard of compiled code names, from the message of Dynamo."""
    first = text.strip().partition("\n")[0]
    matched = _GUARD.match(first)
    return matched.group(1) if matched else first
