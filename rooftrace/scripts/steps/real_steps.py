"""The turns of a script that really runs on a device, each with its time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from rooftrace.errors import RequestError
from rooftrace.scripts.launch import Ended, Ranks, launched, understood
from rooftrace.scripts.steps.calls import ModuleCall, runs_where
from rooftrace.scripts.steps.keeping import Kinds, Optimizers
from rooftrace.scripts.steps.records import TRAINING, Failure
from rooftrace.scripts.steps.running import failure_of
from rooftrace.scripts.steps.watching import OpenTurn, watch
from rooftrace.tracer import torch_private
from rooftrace.tracer.phases import call_apart
from rooftrace.tracer.recording import original_of, put
from rooftrace.tracer.sharding import fsdp


class RealTurn(Struct, frozen=True, kw_only=True):
    """One turn that ran.

    kind: training or inference.  label: the call, in words.  calls: turns with an equal
    number called the same modules with the same sizes.  seconds: on the wall, from idle device to
    idle device, without `loading`, the seconds that the script waited for data loaders.  peak:
    bytes that tensors took at most; None where the device does not tell.
    """

    kind: str
    label: str
    calls: int
    seconds: float
    loading: float
    peak: int | None = None


class RealScript(Struct, frozen=True):
    """A script that ran: its turns in order, its end, and whether it called compiled code.

    code: with which it exited.  failure: the error that ended it.
    """

    turns: tuple[RealTurn, ...]
    code: int
    failure: Failure | None
    compiled: bool


def real_turns(
    command: Sequence[str], device: torch.device, most: int, seconds: float, stdout: Any = None
) -> RealScript:
    """Run a script in a separate process on a real device, and time its turns.

    command: the words of its command line, without a launcher of several processes: this process is
    one that a launcher has started, or the only one.  most: training steps, or turns of a script
    that trains nothing, after which it is ended, as it is after `seconds` and a turn.  stdout:
    where it prints; default `sys.stdout`.  What it raises is in the result.

    Raises RequestError for a command line that starts several processes.
    """
    made = call_apart(time_here, tuple(command), str(device), most, seconds, stdout=stdout)
    return msgspec.msgpack.decode(made, type=RealScript)


def time_here(ask: Any, command: tuple[str, ...], device: str, most: int, seconds: float) -> bytes:
    """Run a script in this process, which it has for itself, as `real_turns` does."""
    line = understood(command)
    if (line.world or 1) > 1:
        raise RequestError(
            f"{line.launcher} of {line.world} processes: start them with it, each measuring: "
            f"{line.launcher} ... -m rooftrace measure '{line.program} ...'"
        )
    end = perf_counter() + seconds

    def enough(turns: Sequence[RealTurn]) -> bool:
        trained = sum(turn.kind == TRAINING for turn in turns)
        done = (trained or len(turns)) >= most or perf_counter() > end
        return done and len(turns) > 0

    compiled: list[Any] = []
    run = launched(line, Ranks(), real=True)
    timer = TurnTimer(torch.device(device), enough, run.stop)

    def made(ended: Ended) -> bytes:
        timer.end()
        script = RealScript(tuple(timer.turns), ended.code, failure_of(ended), bool(compiled))
        return msgspec.msgpack.encode(script)

    timer.begin()
    _note_compilers(compiled)
    return run(made)


def _note_compilers(compiled: list[Any]) -> None:
    """From here on `compiled` gets the compiler of each compiled callable that is called."""

    frames = torch_private.eval_frame
    name = "_callback_from_stance"
    original = original_of(frames, name)

    def noted(callback: Any) -> Any:
        compiled[:] = [callback] if callable(callback) else compiled
        return original(callback)

    put(frames, {name: noted} if callable(original) else {})


class TurnTimer:
    """Receives the events of a script, and times its turns.

    enough: called before each turn.  stop: ends the script; it raises.
    """

    def __init__(
        self,
        device: torch.device,
        enough: Callable[[Sequence[RealTurn]], bool],
        stop: Callable[[], None],
    ) -> None:
        self.turns: list[RealTurn] = []
        self._device, self._enough, self._stop = device, enough, stop
        self._optimizers = Optimizers(self._there)
        self._kinds = Kinds(self._optimizers)
        self._open: OpenTurn | None = None
        self._alike: dict[Any, int] = {}  # numbers of turns, by their calls
        self._loading, self._batches = 0.0, 0
        self._looking = threading.Lock()
        self._leader: int | None = None  # the thread whose calls make turns
        self._calling = False  # a call of it is under way
        self._differentiated = False  # a backward has run since the last call

    def begin(self) -> None:
        """From here on calls are watched."""
        backward = original_of(torch.autograd, "backward")

        def differentiate(*args: Any, **kwargs: Any) -> Any:
            try:
                return backward(*args, **kwargs)
            finally:
                self._differentiated = True

        def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._optimizers.note_step(optimizer)

        register_optimizer_step_post_hook(stepped)
        self._optimizers.meet()
        put(torch.autograd, {"backward": differentiate})
        watch(self)

    @contextlib.contextmanager
    def leading(self, module: nn.Module | None = None) -> Iterator[bool]:
        """Inside, whether calls of the running thread make turns: no other is halfway in one."""
        with self._looking:
            here, turn = threading.get_ident(), self._open
            if turn is None or (self._kinds.is_complete(turn) and not self._calling):
                self._leader = here
            leads = self._leader == here
            self._calling |= leads
        try:
            yield leads
        finally:
            self._calling &= not leads

    def run(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a module inside of another, or in a thread that does not lead."""
        return original_of(nn.Module, "__call__")(module, *args, **kwargs)

    def call(self, made: ModuleCall) -> Any:
        """Run a module that is called from outside of any, or the rest of it."""
        if runs_where(self._there, made.module, made.arguments):
            self._turn_begins(made)
        return made.run()

    def loaded(self, seconds: float) -> None:
        """A data loader gave a batch, after so many seconds."""
        self._loading += seconds
        self._batches += 1

    def end(self) -> None:
        """The script has ended."""
        if self._open is not None:
            self._finish(self._open)

    def _there(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._device.type or fsdp.is_offloaded(tensor)

    def _turn_begins(self, made: ModuleCall) -> None:
        turn = self._open
        if turn is not None:
            self._note_backward(turn)
            if not self._kinds.goes_on(turn, made.module, made.arguments, self._batches):
                self._finish(turn)
        if self._open is None:
            if self._enough(self.turns):
                self._stop()
            turn = OpenTurn(self._kinds.of(made.module), str(made))
            self._optimizers.steps.clear()
            self._synchronize()
            self._loading = 0.0
            self._open, turn.began = turn, perf_counter()
        assert turn is not None
        self._kinds.note(turn, made.module, self._batches)
        turn.calls.append(made.look())

    def _note_backward(self, turn: OpenTurn) -> None:
        if self._differentiated:
            self._kinds.differentiated(turn)
        self._differentiated = False

    def _finish(self, turn: OpenTurn) -> None:
        self._note_backward(turn)
        self._open = None
        peak = None
        self._synchronize()
        seconds = perf_counter() - turn.began
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        calls = tuple(look.key for look in turn.calls)
        self.turns.append(
            RealTurn(
                kind=turn.kind,
                label=turn.label,
                calls=self._alike.setdefault(calls, len(self._alike)),
                seconds=max(seconds - self._loading, 0.0),
                loading=self._loading,
                peak=peak,
            )
        )

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
