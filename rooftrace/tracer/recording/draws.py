"""Random numbers that the traced code draws on the host: the same in every trace.

A generator that belongs to the process is seeded and restored only where no other thread could
draw from it meanwhile.  Otherwise a recording's threads draw from generators of its own.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rooftrace.tracer.patches import contexts, original_of, replaced, shared
from rooftrace.tracer.tape import Tape

_SEED = 0


@contextlib.contextmanager
def draws_repeated(tape: Tape) -> Iterator[None]:
    """Inside, random numbers that the code draws on the host are the same every time.

    At the end the process's generators are as if nothing had been drawn inside.
    """
    if shared.alone():
        with _seeded():
            yield
    else:
        with _apart(tape):
            yield


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """The generators of the process, seeded and restored."""
    with contexts.draws_undone():
        random.seed(_SEED)
        torch.default_generator.manual_seed(_SEED)
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            numpy.seed(_SEED)
        yield


@contextlib.contextmanager
def _apart(tape: Tape) -> Iterator[None]:
    """Generators of this recording, for its threads.

    A C function that the code has imported by its name (`from random import random`) still draws
    from the process's generator.
    """
    own = _Own()
    before, tape.generators = tape.generators, own
    try:
        with contextlib.ExitStack() as undo:
            for home, replacements in own.replacements():
                undo.enter_context(replaced(home, replacements))
            yield
    finally:
        tape.generators = before


class _Own:
    """The generators of one recording: Python's, torch's for the host, and numpy's."""

    def __init__(self) -> None:
        self._torch = torch.Generator()
        self._torch.manual_seed(_SEED)
        self._python = random.Random(_SEED)
        self._modules: Any = sys.modules.get("numpy.random")
        self._numpy: Any = self._modules and self._modules.RandomState(_SEED)

    def replacements(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """What stands in place of the functions that draw from the process's generators."""
        own = self._torch
        seeds: dict[str, Any] = {
            "manual_seed": lambda seed: own.manual_seed(int(seed)),
            "seed": own.seed,
            "initial_seed": own.initial_seed,
            "get_rng_state": own.get_state,
            "set_rng_state": own.set_state,
        }
        yield torch, seeds
        yield torch.random, seeds
        for home, kind, state in (
            (random, random.Random, self._python),
            (self._modules, getattr(self._modules, "RandomState", None), self._numpy),
        ):
            if home is not None and kind is not None:
                yield home, {name: getattr(state, name) for name in _names_of_methods(home, kind)}

    def states(self) -> Any:
        """What was drawn so far.

        The process's generator of numpy counts too: its functions may be imported by their names,
        and are not seen.  Of Python's functions that is seen (see `replay/outside`).
        """
        numpy = []
        if self._numpy is not None:
            for read in (self._numpy.get_state, original_of(self._modules, "get_state")):
                state = read()
                numpy.append((state[1].tobytes(), *state[2:]))
        return self._python.getstate(), self._torch.get_state().numpy().tobytes(), numpy

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op on the host that draws from the generator of the process: from ours instead."""
        own, default = self._torch, torch.default_generator
        if kwargs.get("generator") not in (None, default):
            return func(*args, **kwargs)
        takes = _with_generator(func)
        if takes is not None:
            return takes(*args, **{**kwargs, "generator": own})
        before = default.get_state()
        default.set_state(own.get_state())
        try:
            return func(*args, **kwargs)
        finally:
            own.set_state(default.get_state())
            default.set_state(before)


@functools.cache
def _names_of_methods(home: Any, kind: type) -> tuple[str, ...]:
    return tuple(
        name
        for name in list(vars(home))
        if hasattr(kind, name)
        and isinstance(getattr(original_of(home, name), "__self__", None), kind)
    )


@functools.cache
def _with_generator(func: Any) -> Callable[..., Any] | None:
    """The overload of an op that takes a generator beside the same arguments; None: none does."""
    wanted = {argument.name for argument in func._schema.arguments} | {"generator"}
    packet = func._overloadpacket
    for overload in (func, *(getattr(packet, name) for name in packet.overloads())):
        if {argument.name for argument in overload._schema.arguments} == wanted:
            return overload  # type: ignore[no-any-return]
    return None
