"""An emulated device: from here on torch.cuda answers for a chip, in the whole process.

What torch's own Python code asks of its C half is answered there, so that most of torch.cuda runs
as it is written, also where user code imported a function of it before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from rooftrace.tracer.emulation import (
    accelerator,
    backends,
    defaults,
    devices,
    extensions,
    files,
    generators,
    graphs,
    legacy,
    memory,
    streams,
    triton,
)
from rooftrace.tracer.emulation.facts import Device
from rooftrace.tracer.emulation.pinning import Calls, Pinned
from rooftrace.tracer.emulation.state import Answers, Assume, Clock, Emulation, Meter, Tell
from rooftrace.tracer.patches import put

_cuda: Any = torch.cuda


def emulate(
    device: Device,
    meter: Meter,
    clock: Clock,
    index: int = 0,
    assume: Assume | None = None,
    tell: Tell | None = None,
) -> None:
    """From here on this process sees a CUDA device.  For a process that runs nothing else.

    index: the device of this process.  assume: is told, once for each kind, of answers that follow
    a policy: kind and text.  tell: is told of CUDA graphs: "capture", "captured", "replay",
    "replayed".
    """
    here = Emulation(device, meter, clock, index, assume, tell)
    _forget_answers()
    pinned = Pinned()
    for home, answers in _answers(here, pinned):
        for place, some in _wherever_bound(answers) if home is _cuda else [(home, answers)]:
            put(place, some)
    extensions.watch_imports()
    entered: Any = Calls(pinned)
    entered.__enter__()  # for as long as the process lives
    for fact in device.guessed:
        here.assume(
            f"device {fact}",
            f"{device.name}: the {fact} is not in its chip file and was inferred",
        )


def _answers(here: Emulation, pinned: Pinned) -> Iterator[Answers]:
    """All that is answered; what stands later replaces what stands before."""
    types = legacy.classes()
    yield from extensions.answers()
    for part in (backends, devices, memory, streams, accelerator, generators, graphs, files):
        yield from part.answers(here)
    yield from pinned.answers()
    yield from legacy.answers(types)
    yield from defaults.answers(types)
    yield from triton.answers(here.assume)


def _wherever_bound(answers: dict[str, Any]) -> Iterator[Answers]:
    """Modules of torch.cuda that hold one of these names: they import them from each other."""
    named = {id(part): part for name, part in sys.modules.items() if name.startswith("torch.cuda")}
    parts = [part for part in named.values() if part is not None]
    for part in parts:
        yield part, {name: item for name, item in answers.items() if name in vars(part)}
    # The C half puts these into torch.cuda when it is initialized.
    unset = answers.keys() - {name for part in parts for name in vars(part)}
    yield _cuda, {name: answers[name] for name in unset}


_ASKING = ("torch.cuda", "torch.accelerator", "torch.utils._triton", "torch._utils", "torch.amp")
"""Modules of torch that keep what they once heard of a device."""


def _forget_answers() -> None:
    """Clear the caches of functions that ask for a device: their answers change here."""
    for name, module in list(sys.modules.items()):
        if name.startswith(_ASKING) and module is not None:
            for item in list(vars(module).values()):
                clear = getattr(item, "cache_clear", None)
                if clear is not None and getattr(item, "__module__", "").startswith("torch"):
                    clear()
