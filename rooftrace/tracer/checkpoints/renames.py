"""Which tensor of one checkpoint is that of another under a new name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple

from rooftrace.tracer.weightfiles import Stored


class Rename(NamedTuple):
    """A name before, the name after, and how that is known."""

    before: str
    after: str
    by: str


def renames(before: Mapping[str, Stored], after: Mapping[str, Stored]) -> list[Rename]:
    """Names of the same tensors among those that only one side has.

    First by their bytes, which are read for that where dtype and shape occur on both sides.  Then
    by shape and the end of the name, where that leads to a single tensor on each side.
    """
    pairs = [Rename(old, new, "bytes") for old, new in _by_bytes(before, after)]
    left = _without(before, {pair.before for pair in pairs})
    free = _without(after, {pair.after for pair in pairs})
    return [*pairs, *(Rename(old, new, "shape and name") for old, new in _by_name(left, free))]


def _without(tensors: Mapping[str, Stored], names: set[str]) -> dict[str, Stored]:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def _by_bytes(
    before: Mapping[str, Stored], after: Mapping[str, Stored]
) -> Iterable[tuple[str, str]]:
    looks = {(t.dtype, t.shape) for t in before.values()} & {
        (t.dtype, t.shape) for t in after.values()
    }
    sides: tuple[dict[Hashable, list[str]], ...] = (defaultdict(list), defaultdict(list))
    for tensors, names in zip((before, after), sides, strict=True):
        for name, tensor in tensors.items():
            if (tensor.dtype, tensor.shape) in looks and tensor.cells:
                names[tensor.dtype, tensor.shape, tensor.digest()].append(name)
    for key, old in sides[0].items():
        new = sides[1].get(key, [])
        if len(old) == 1 and len(new) == 1:
            yield old[0], new[0]
        else:  # several tensors of the same bytes, as biases of zeros
            yield from _by_ends(old, new)


def _by_name(
    before: Mapping[str, Stored], after: Mapping[str, Stored]
) -> Iterable[tuple[str, str]]:
    shapes: tuple[dict[tuple[int, ...], list[str]], ...] = (defaultdict(list), defaultdict(list))
    for tensors, names in zip((before, after), shapes, strict=True):
        for name, tensor in tensors.items():
            names[tensor.shape].append(name)
    for shape, old in shapes[0].items():
        yield from _by_ends(old, shapes[1].get(shape, []))


def _by_ends(before: list[str], after: list[str]) -> Iterable[tuple[str, str]]:
    """Pairs of names that end in the same steps and have those alone on their side.

    The longest ends come first: "model.layers.0.up.weight" goes with "layers.0.up.weight".
    """
    left, free = set(before), set(after)
    deepest = max((name.count(".") + 1 for name in (*before, *after)), default=0)
    for steps in range(deepest, 0, -1):
        if not left or not free:
            return
        ends = _ends(left, steps), _ends(free, steps)
        for end, old in ends[0].items():
            new = ends[1].get(end, [])
            if len(old) == 1 and len(new) == 1:
                left.remove(old[0])
                free.remove(new[0])
                yield old[0], new[0]


def _ends(names: Iterable[str], steps: int) -> dict[str, list[str]]:
    by_end: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        parts = name.split(".")
        if len(parts) >= steps:
            by_end[".".join(parts[-steps:])].append(name)
    return by_end
