"""Random numbers of the process: its generators as they were, whatever code draws meanwhile."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def draws_undone(devices: bool = False) -> Iterator[None]:
    """At the end the generators of Python, torch and numpy are as if nothing had been drawn.

    devices: also those of the GPUs that this process uses.
    """
    numpy: Any = sys.modules.get("numpy.random")
    states = random.getstate(), torch.get_rng_state(), numpy and numpy.get_state()
    cuda: Any = torch.cuda
    on_gpus = cuda.get_rng_state_all() if devices and cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        if numpy is not None:
            numpy.set_state(states[2])
        if on_gpus is not None:
            cuda.set_rng_state_all(on_gpus)
