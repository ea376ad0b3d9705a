"""The stack of Python's that the command line runs on."""

import resource

import pytest

from rooftrace._processes import with_stack
from rooftrace.reporting.cli import main

CALLS = 2_000


def nothing() -> None:
    pass


def mapped(depth: int) -> int:
    """Pages that a loop of calls maps, so many calls below this one."""
    if depth:
        return mapped(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        nothing()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@with_stack
def mapped_at_most() -> int:
    return max(map(mapped, range(300)))


def test_calls_at_no_depth_map_memory_again_and_again() -> None:
    assert mapped_at_most() < CALLS / 10


def test_a_function_with_a_stack_is_as_it_was() -> None:
    with pytest.raises(SystemExit) as stop:
        main(["no-such-command"])
    assert stop.value.code == 2 and main.__name__ == "main"
