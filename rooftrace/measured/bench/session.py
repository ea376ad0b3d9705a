"""Measurement sessions: the plan of a suite, the run so far, and timed scripts as rows of a run."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rooftrace._processes import started_again
from rooftrace.errors import RequestError, TargetError
from rooftrace.hardware.units import format_time
from rooftrace.measured.bench import machine
from rooftrace.measured.bench.clock import Bench, MeasureError
from rooftrace.measured.bench.operations import NotOfferedError
from rooftrace.measured.bench.runfile import MicroRow, ModelRow, Run
from rooftrace.tracer import names

if TYPE_CHECKING:
    from rooftrace.scripts.steps import RealTurn

BUDGET_S, QUICK_S = 480.0, 90.0
"""The usual budget of the suite, and of a quick trial [s]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuitePlan:
    """A plan: the cases to measure, the device and the file."""

    out: Path  # the run; an existing one is continued
    device: str  # "cpu", "cuda", "cuda:1"
    budget_s: float = BUDGET_S  # s to spend
    quick: bool = False  # a trial of everything in about a minute
    # Models of the suite (wildcards too) or targets as `rooftrace report` takes them; none: all.
    names: tuple[str, ...] = ()
    phases: tuple[str, ...] | None = None  # of a target; None: every phase
    batch: int | None = None  # of a target
    seq: int | None = None  # of a target

    @staticmethod
    def of(
        names: Sequence[str] = (),
        *,
        out: str | None = None,
        device: str | None = None,
        budget_s: float | None = None,
        quick: bool = False,
        phases: Sequence[str] | None = None,
        batch: int | None = None,
        seq: int | None = None,
    ) -> SuitePlan:
        """A plan with defaults for arguments that are None.

        out: measurements/DEVICE-DATE.json.gz, with the rank in its name where a launcher has
        started this process as another rank than 0.  device: cuda where there is one.
        budget_s: 480, of a quick trial 90.  Raises MeasureError for a device that does not exist.
        """
        device = device or machine.default_device()
        usual = QUICK_S if quick else BUDGET_S
        return SuitePlan(
            out=_of_rank(Path(out) if out else _usual_file(device)),
            device=device,
            budget_s=usual if budget_s is None else budget_s,
            quick=quick,
            names=tuple(names),
            phases=tuple(phases) if phases else None,
            batch=batch,
            seq=seq,
        )

    def arguments(self, budget_s: float) -> list[str]:
        """The arguments of the command that repeats this plan, with another budget."""
        arguments = [*self.names, "--out", str(self.out), "--device", self.device]
        arguments += ["--budget", f"{budget_s:.0f}"]
        arguments += ["--quick"] if self.quick else []
        arguments += ["--phase", ",".join(self.phases)] if self.phases else []
        arguments += ["--batch", str(self.batch)] if self.batch is not None else []
        return [*arguments, "--seq", str(self.seq)] if self.seq is not None else arguments


def _of_rank(path: Path) -> Path:
    """The file of this process: each rank of a launcher writes a different one."""
    rank = os.environ.get("RANK", "0")
    if not rank.isdigit() or int(rank) == 0:
        return path
    name, dot, ending = path.name.partition(".")
    return path.with_name(f"{name}-rank{int(rank)}{dot}{ending}")


def _usual_file(device: str) -> Path:
    facts = machine.device_facts(machine.checked_device(device))
    name = machine.slug(str(facts["name"])).removesuffix("-measured")
    return Path("measurements") / f"{name}-{time.strftime('%Y-%m-%d', time.gmtime())}.json.gz"


# -- session ---------------------------------------------------------------------------------------

_GRACE_S = 20.0
"""Seconds that a case that cannot be interrupted may run beyond its limit."""


class CaseTimeoutError(Exception):
    """A case took longer than its limit."""


Hang = Callable[["Session"], None]
Clock = Callable[[], float]
"""A clock such as `time.monotonic`, in seconds."""


class Session:
    """The run so far and the time left.  A case that fails or hangs is recorded; the next one runs.

    deadline: the end of the budget by `clock`.
    """

    def __init__(
        self,
        plan: SuitePlan,
        bench: Bench,
        run: Run,
        deadline: float,
        on_hang: Hang | None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.plan, self.bench, self.run, self.deadline = plan, bench, run, deadline
        self.now = clock
        self.current = ""
        self._done = run.done()
        self._flushed, self._flush_s = self.now(), 0.0
        self._watch = _Watch(lambda: on_hang(self)) if on_hang is not None else None
        self._reported = self.now()
        settings = {"budget_s": plan.budget_s, "quick": plan.quick, "names": list(plan.names)}
        self.run = replace(run, settings={**run.settings, **settings})

    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.deadline - self.now()

    def is_done(self, key: str) -> bool:
        """Whether the case was measured, or has failed."""
        return key in self._done

    def attempt(self, key: str, limit_s: float, work: Callable[[], MicroRow | ModelRow]) -> bool:
        """Try a case; afterwards the run has its row, or the reason why there is none.

        Raises MeasureError if the device does not synchronize, and the errors of a target.
        """
        if self.is_done(key):
            return True
        self.current = key
        limit = min(limit_s, max(self.left(), 1.0) + _GRACE_S / 2)
        reason, failed, lost = "", True, False
        try:
            with self._watched(limit + _GRACE_S), _alarm(limit):
                row = work()
        except (TargetError, RequestError):
            raise
        except NotOfferedError as error:
            reason, failed = first_line(error), False
        except CaseTimeoutError:
            failed = self.left() > 0
            reason = f"did not end in {limit:.0f} s" if failed else "the budget ended"
        except Exception as error:  # whatever a kernel, a compiler or a model may raise
            reason = f"{type(error).__name__}: {first_line(error)}"
            lost = not self._alive()
        self.current = ""
        if not reason:
            self.add(row)
            return True
        self.add_trouble(key, reason, failed)
        if failed:
            self.bench.progress(f"{key}: {reason}")
        free()
        if lost:
            self.flush()
            raise MeasureError(
                f"the device does not answer after {key!r} ({reason}); {self.plan.out} holds "
                f"{self.run.counts}: the same command goes on after that case"
            )
        return False

    def leave_out(self, key: str, reason: str) -> None:
        """Record that a case was left out, unless it was already measured or tried."""
        if not self.is_done(key):
            self.add_trouble(key, reason, failed=False)

    def add(self, row: MicroRow | ModelRow) -> None:
        """Add a row to the run, and write the run to its file."""
        self.run = self.run.with_row(row)
        self._done.add(row.key)
        self._added()

    def add_trouble(self, key: str, reason: str, failed: bool = True) -> None:
        """Record why a case gave no row.  failed: it was tried, and is not tried again."""
        self.run = self.run.with_trouble(key, reason, failed)
        if failed:
            self._done.add(key)
        self._added()

    def _added(self) -> None:
        # A large file takes a while to write: at most a twentieth of the time goes there.
        if self._flush_s < 0.02 or self.now() - self._flushed >= 20 * self._flush_s:
            self.flush()
        if self.now() - self._reported > 10:
            self._reported = self.now()
            self.bench.progress(f"{self.run.counts}, {max(self.left(), 0):.0f} s left")

    def flush(self) -> None:
        """Write the run to its file, once there is anything to write."""
        run = self.run
        if not (run.micro or run.models or run.errors or run.skipped):
            return
        start = self.now()
        self.run.save(self.plan.out)
        self._flushed = self.now()
        self._flush_s = self._flushed - start

    def note(self, text: str | None) -> None:
        """Remember a condition of the measurement."""
        if text and text not in self.run.notes:
            self.run = replace(self.run, notes=(*self.run.notes, text))

    def clock(self, when: str) -> None:
        """Note the clocks of the device, where it reports them."""
        read = machine.clocks(self.bench.device)
        self.note(f"clocks, {when}: {read}" if read else None)

    def stop_watch(self) -> None:
        """End the watching thread."""
        if self._watch is not None:
            self._watch.stop()

    def _watched(self, seconds: float) -> contextlib.AbstractContextManager[None]:
        return self._watch.over(seconds) if self._watch is not None else contextlib.nullcontext()

    def _alive(self) -> bool:
        try:
            self.bench.synchronize()
        except RuntimeError:
            return False
        return True


class _Watch:
    """Calls `alarm` from its own thread if a block takes longer than its limit."""

    def __init__(self, alarm: Callable[[], None]) -> None:
        self._alarm, self._until = alarm, math.inf
        self._ended = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    @contextlib.contextmanager
    def over(self, seconds: float) -> Iterator[None]:
        self._until = time.monotonic() + seconds
        try:
            yield
        finally:
            self._until = math.inf

    def stop(self) -> None:
        self._ended.set()

    def _look(self) -> None:
        while not self._ended.wait(1.0):
            if time.monotonic() > self._until:
                self._alarm()
                return


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise CaseTimeoutError inside after so many seconds, on systems with signals (Unix)."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or not hasattr(signal, "setitimer"):
        yield
        return

    def ring(number: int, frame: Any) -> None:
        raise CaseTimeoutError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def first_line(error: BaseException) -> str:
    """The first line of an error, or the name of its type."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def free() -> None:
    """Return unused memory to the device."""
    gc.collect()
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


def start_again(session: Session) -> None:
    """Record the case that hangs, and replace this process by one that continues after it."""
    key = session.current
    session.add_trouble(key, "could not be interrupted: it hangs")
    session.flush()
    if session.left() < 5:
        sys.stderr.write(f"rooftrace: {key} hangs; the budget has ended\n")
        os._exit(0)
    arguments = ["-m", "rooftrace.measured", *session.plan.arguments(session.left())]
    sys.stderr.write(f"rooftrace: {key} hangs; starting again after it\n")
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *arguments], started_again())


# -- scripts ---------------------------------------------------------------------------------------

_WARMUPS = 3
"""Iterations that a row leaves out, if there are more."""
_MOST = 50
"""Iterations after which a script is ended, without --steps."""
_PHASES = {"training": "training", "inference": "forward"}


def script_rows(target: str, bench: Bench) -> list[ModelRow]:
    """A row for each kind of steady iteration of a script, run for the seconds of `bench`.

    Its output goes to stderr.  Seconds are of iterations, from idle device to idle device, without
    waits for data loaders.  Raises TargetError where the script fails, or runs nothing on the
    device.
    """
    from rooftrace.scripts.steps import real_turns

    command = names.ScriptCommand.of(target)
    if command.boundary != names.BOUNDARIES[0]:
        raise RequestError(
            f"{target}: --boundary {command.boundary}: measured turns begin as found"
        )
    most = command.steps or _MOST
    ran = real_turns(command.words, bench.device, most, bench.budget_s, stdout=sys.stderr)
    if ran.failure is not None:
        raise TargetError(f"{target}: it failed on {bench.device}: {ran.failure}")
    if ran.code:
        raise TargetError(f"{target}: it exited with code {ran.code} on {bench.device}")
    if not ran.turns:
        raise TargetError(
            f"{target}: none of its modules ran on {bench.device}, the device that is measured: "
            "say --device, or tell the script which device to take"
        )
    mode = "compiled" if ran.compiled else "eager"
    trained = len(_of("training", ran.turns))
    if trained < len(ran.turns) and not target.startswith(names.RUN):
        target = f"{names.RUN}--steps {trained or len(ran.turns)} {target}"  # as far as it ran
    return [_row(target, kind, mode, ran.turns) for kind in _PHASES if _of(kind, ran.turns)]


def _of(kind: str, turns: Sequence[RealTurn]) -> list[RealTurn]:
    return [turn for turn in turns if turn.kind == kind]


def _row(target: str, kind: str, mode: str, turns: Sequence[RealTurn]) -> ModelRow:
    """The row of the most frequent iterations of a kind: those with equal calls of modules."""
    of_kind = _of(kind, turns)
    counts = Counter(turn.calls for turn in of_kind)
    most = max(reversed(counts), key=lambda calls: counts[calls])
    alike = [turn for turn in of_kind if turn.calls == most]
    kept = alike[min(_WARMUPS, len(alike) - 1) :]
    peaks = [turn.peak for turn in kept if turn.peak is not None]
    waited = sum(turn.loading for turn in kept) / len(kept)
    phase = _PHASES[kind]
    return ModelRow(
        key=ModelRow.key_of(target, phase, mode, {}),
        model=target,
        phase=phase,
        mode=mode,
        sizes={},
        seconds=tuple(turn.seconds for turn in kept),
        peak_bytes=max(peaks, default=None),
        note=f"{kept[0].label}; {format_time(waited)} of data loaders each, which are left out",
    )
