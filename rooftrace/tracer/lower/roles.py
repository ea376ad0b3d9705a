"""Whose bytes a value is that an op makes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from msgspec.structs import replace

from rooftrace.tracer.graph import Op, Tensor
from rooftrace.tracer.ops import traits


def with_filled_roles(values: Sequence[Tensor], ops: Iterable[Op]) -> tuple[Tensor, ...]:
    """The values; what was allocated before it was filled has the role of what filled it."""
    roles = _filled_roles(values, list(ops))
    if not roles:
        return tuple(values)
    return tuple(
        replace(value, role=roles[value.storage]) if value.storage in roles else value
        for value in values
    )


def _filled_roles(values: Sequence[Tensor], ops: Sequence[Op]) -> dict[int, str]:
    """The roles of storages that an op allocates and a later one fills, by what that one reads.

    A buffer that weights are gathered in, or gradients are sent from, is temporary.
    """
    allocated = {
        values[value].storage
        for op in ops
        if op.name in traits.UNINITIALISED
        for value in op.outputs
        if values[value].role == "constants"
    }
    roles: dict[int, str] = {}
    for op in ops:
        written = {values[value].storage for value in op.outputs} & allocated - roles.keys()
        if not written or op.kind == "view":
            continue
        read = {values[value].storage for value in op.inputs} - written
        kinds = {roles.get(storage, values[storage].role) for storage in read}
        for storage in written:
            copies = op.collective is not None or kinds <= {"constants", "weights", "temporary"}
            temporary = copies and "activations" not in kinds and kinds != {"constants"}
            roles[storage] = "temporary" if temporary else made_role(op.target, op.part, kinds)
    return {storage: role for storage, role in roles.items() if role != "constants"}


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
