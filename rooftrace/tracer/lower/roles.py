"""Whose bytes a value is that an op makes."""

from __future__ import annotations

from collections.abc import Collection

from rooftrace.tracer.ops import traits


def made_role(target: str, part: str, inputs: Collection[str]) -> str:
    """The role of a new storage, from the op that makes it and the roles of what that reads.

    What is kept past the step has its own role, which is known when the step is over.
    """
    if part in ("backward", "optimizer"):
        return "temporary"
    if traits.draws(target):
        return "activations"
    roles = set(inputs)
    if roles <= {"constants"}:
        return "constants"
    if roles <= {"constants", "weights"}:
        return "temporary"  # a cast or rearranged copy of weights, made anew every step
    return "activations"
