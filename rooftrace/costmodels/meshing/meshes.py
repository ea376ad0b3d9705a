"""The meshes that a number of chips can be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence


def meshes_of(chips: int, axes: Sequence[str], most: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Every way to write `chips` as a product of a size for each axis, in the order of the axes.

    most: the largest size of an axis, where it has one (tensor parallelism within a node).  Axes
    of size 1 are left out, but for the first one of all.
    """
    for sizes in _products(chips, len(axes)):
        mesh = dict(zip(axes, sizes, strict=True))
        if all(size <= most.get(axis, size) for axis, size in mesh.items()):
            yield {axis: size for axis, size in mesh.items() if size > 1} or {axes[0]: 1}


def _products(number: int, factors: int) -> Iterator[tuple[int, ...]]:
    """The tuples of so many whole numbers whose product is `number`."""
    if factors == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _products(number // first, factors - 1):
                yield (first, *rest)


def mesh_words(mesh: Mapping[str, int]) -> str:
    """ "dp=32, tp=8"."""
    return ", ".join(f"{axis}={size}" for axis, size in mesh.items())
