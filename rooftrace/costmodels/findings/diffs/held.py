"""What is held at the peak of memory before and after, and by whom."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from rooftrace.costmodels.findings.diffs import changes
from rooftrace.costmodels.memory import Held, Memory
from rooftrace.tracer.changes import Change


def held_changes(
    before: Memory, after: Memory, renamed: Mapping[str, str]
) -> tuple[changes.HeldChange, ...]:
    """Tensors of which more or less is held at the peak, the largest change first.

    Together they are the difference of the peaks.  renamed: paths of the second side (indices
    starred) by those of the first.
    """
    sums: list[Counter[Hashable]] = [Counter(), Counter()]
    what: dict[Hashable, Held] = {}
    moved = [_renamed(held, renamed) for held in before.tensors]
    for side, tensors in enumerate((moved, after.tensors)):
        for held in tensors:
            key = held.role, held.module, held.op, held.part, held.name, held.saved
            sums[side][key] += held.bytes
            what[key] = held
    differing = [
        changes.HeldChange(
            role=held.role,
            module=held.module,
            op=held.op,
            part=held.part,
            name=held.name,
            dtype=held.dtype,
            saved=held.saved,
            bytes=Change(sums[0][key], sums[1][key]),
        )
        for key, held in what.items()
        if sums[0][key] != sums[1][key]
    ]
    kept = _without_moved(differing)
    return tuple(sorted(kept, key=lambda held: (-abs(held.bytes.delta), held.module, held.name)))


def _renamed(held: Held, renamed: Mapping[str, str]) -> Held:
    new = renamed.get(held.module)
    if new is None:
        return held
    name = held.name
    if name.startswith(f"{held.module}."):
        name = f"{new}{name[len(held.module) :]}"
    return replace(held, module=new, name=name)


def _without_moved(differing: Sequence[changes.HeldChange]) -> list[changes.HeldChange]:
    """The changes without tensors that another module makes now, as many and as large."""
    groups: dict[Hashable, list[changes.HeldChange]] = defaultdict(list)
    for held in differing:
        key = held.role, held.op, held.part, held.dtype, held.saved, held.name.rpartition(".")[2]
        groups[key].append(held)
    return [
        held
        for members in groups.values()
        if sum(each.bytes.delta for each in members)
        for held in members
    ]
