"""Which tensor of one checkpoint is that of another under a new name."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from rooftrace.tracer.changes.aligning import Pairing
from rooftrace.tracer.weightfiles import Stored


class Rename(NamedTuple):
    """A name before, the name after, and how that is known."""

    before: str
    after: str
    by: str


def renames(before: Mapping[str, Stored], after: Mapping[str, Stored]) -> list[Rename]:
    """Names of the same tensors among those that only one side has.

    First by their bytes, which are read for that where dtype and shape occur on both sides; of
    several tensors of the same bytes, as biases of zeros, by the ends of their names too.  Then by
    shape and the end of the name, where that leads to a single tensor on each side.
    """
    pairing = Pairing(sorted(before), sorted(after))
    looks = {(t.dtype, t.shape) for t in before.values()}
    looks &= {(t.dtype, t.shape) for t in after.values()}

    def by_bytes(tensor: Stored) -> Hashable:
        look = tensor.dtype, tensor.shape
        return (look, tensor.digest()) if look in looks and tensor.cells else None

    keys = _keys(pairing, before, after, by_bytes)
    pairing.by(keys[0].get, keys[1].get, alone=True)
    _by_ends(pairing, keys)
    equal = len(pairing.pairs)
    _by_ends(pairing, _keys(pairing, before, after, lambda tensor: tensor.shape))
    return [
        Rename(old, new, "bytes" if number < equal else "shape and name")
        for number, (old, new, _) in enumerate(pairing.pairs)
    ]


def _keys(
    pairing: Pairing[str],
    before: Mapping[str, Stored],
    after: Mapping[str, Stored],
    key_of: Callable[[Stored], Hashable],
) -> list[dict[str, Hashable]]:
    """The keys of the tensors of each side without a partner."""
    sides = zip((before, after), pairing.left, strict=True)
    return [{name: key_of(tensors[name]) for name in left} for tensors, left in sides]


def _by_ends(pairing: Pairing[str], keys: Sequence[Mapping[str, Hashable]]) -> None:
    """Pair names of one key that end in the same steps and have those alone on their side.

    The longest ends come first: "model.layers.0.up.weight" goes with "layers.0.up.weight".
    """
    deepest = max((name.count(".") + 1 for left in pairing.left for name in left), default=0)
    for steps in range(deepest, 0, -1):
        before, after = (partial(_ending, side, steps) for side in keys)
        pairing.by(before, after, alone=True)


def _ending(keys: Mapping[str, Hashable], steps: int, name: str) -> Hashable:
    """The key of a name with its last steps; None without a key, or as many steps."""
    parts, key = name.split("."), keys[name]
    return None if key is None or len(parts) < steps else (key, *parts[-steps:])
