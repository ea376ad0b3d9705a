"""What tests run in the process of a script, and how a test gets its result."""

import pickle
import sys
from collections.abc import Sequence
from typing import Any

from rooftrace.scripts.launch import Ended, Ranks, launched, understood
from rooftrace.tracer.phases import call_apart
from rooftrace.tracer.recording import Recorder


def ended_of(
    words: Sequence[str], folder: Any = None, world: int | None = None, rank: int = 0, **how: Any
) -> Ended:
    """How a command line ended that was launched in a process of its own."""
    ended: Ended = pickle.loads(call_apart(_launch, words, folder, world, rank, how))
    return ended


def _launch(ask: Any, words: Any, folder: Any, world: Any, rank: int, how: Any) -> bytes:
    line = understood(words, folder)
    return launched(line, Ranks.of(line, world, rank), **how)(pickle.dumps)


def recorded_of(
    words: Sequence[str], folder: Any, world: int | None, rank: int
) -> tuple[Ended, list[str]]:
    """The same under a recorder, and the names of the ops that it ran."""
    made: tuple[Ended, list[str]] = pickle.loads(call_apart(_record, words, folder, world, rank))
    return made


def _record(ask: Any, words: Any, folder: Any, world: Any, rank: int) -> bytes:
    line = understood(words, folder)
    recorder = Recorder(own_step=True, roll_loops=False)
    program = launched(line, Ranks.of(line, world, rank))

    def made(ended: Ended) -> bytes:
        nodes = recorder.graph.nodes
        return pickle.dumps((ended, [str(n.target) for n in nodes if n.op == "call_function"]))

    with recorder:
        return program(made)


def stopped_at(words: Sequence[str], call: int) -> tuple[Ended, int]:
    """A program is stopped at a call of `step` of the module `rooftrace_hook`, and at later ones.

    How it ended, and how often it called.
    """
    made: tuple[Ended, int] = pickle.loads(call_apart(_stop, words, call))
    return made


def _stop(ask: Any, words: Any, call: int) -> bytes:
    steps: list[int] = []
    program = launched(understood(words))
    hook = type(sys)("rooftrace_hook")

    def step() -> None:
        steps.append(1)
        if len(steps) >= call:
            program.stop()

    vars(hook).update(step=step, going=lambda: len(steps) < 100)
    sys.modules["rooftrace_hook"] = hook
    return program(lambda ended: pickle.dumps((ended, len(steps))))
