"""Paths of modules in a trace, so that they are alike in two traces.

A profiler numbers the modules of a class through the whole model ("Linear_17"), so one more module
shifts all numbers after it.  Here they are numbered inside of the module around them ("Linear.2").
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

Stack = tuple[str, ...]
"""Modules by their class and number, outermost first: ("Bert_0", "Linear_17")."""

_WRAPPER = re.compile(
    r"(OptimizedModule|DistributedDataParallel|DataParallel|FullyShardedDataParallel)_\d+"
)
"""Modules of torch around a user's own: with and without them it is the same path."""
_NUMBERED = re.compile(r"(.*)_(\d+)")


def module_paths(stacks: Iterable[Stack]) -> Mapping[Stack, tuple[str, str]]:
    """The path of each stack, and that path with the numbers of repeated blocks starred.

    Of the modules along a path the first with siblings of its class is a repeated block, and so is
    every other one with modules inside; the number of a last module tells q from k and v, and
    stays.
    """
    stacks = list(stacks)
    plain = {stack: _unwrapped(stack) for stack in stacks}
    paths = _paths(set(plain.values()))
    return {(): ("", ""), **{stack: paths[plain[stack]] for stack in stacks}}


def _unwrapped(stack: Stack) -> Stack:
    return tuple(module for module in stack if not _WRAPPER.fullmatch(module))


def _paths(stacks: Iterable[Stack]) -> dict[Stack, tuple[str, str]]:
    inside: dict[Stack, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    whole = {stack[:depth] for stack in stacks for depth in range(1, len(stack) + 1)}
    for stack in whole:
        kind, number = _parts(stack[-1])
        inside[stack[:-1]][kind].add(number)
    places = {
        (above, kind): {number: place for place, number in enumerate(sorted(numbers))}
        for above, kinds in inside.items()
        for kind, numbers in kinds.items()
    }
    paths: dict[Stack, tuple[str, str]] = {(): ("", "")}
    for stack in sorted(whole, key=len):
        path, pattern = paths[stack[:-1]]
        kind, number = _parts(stack[-1])
        beside = places[stack[:-1], kind]
        name = starred = f"{kind}.{beside[number]}"
        if len(beside) == 1:
            starred = kind
        elif stack in inside or "*" not in pattern:
            starred = f"{kind}.*"
        paths[stack] = (_joined(path, name), _joined(pattern, starred))
    return paths


def _parts(module: str) -> tuple[str, int]:
    match = _NUMBERED.fullmatch(module)
    return (match[1], int(match[2])) if match else (module, 0)


def _joined(above: str, name: str) -> str:
    return f"{above}/{name}" if above else name
