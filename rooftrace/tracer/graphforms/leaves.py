"""What differs between graphs of one structure: where, and the values there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import msgspec

Path = tuple[Any, ...]
"""Steps to a value: names of fields, keys of mappings, places in tuples."""
_NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+(?!\d)|\d+")
"""A whole number in a text, with or without commas."""


class StructureError(ValueError):
    """Graphs that differ in more than their numbers: says where."""


class Differing(NamedTuple):
    """A number that is not the same in all graphs, or a text with such numbers."""

    path: Path
    values: tuple[Any, ...]  # one for each graph: all int, all int or float, or all str


def differences(samples: Sequence[Any], path: Path = ()) -> Iterator[Differing]:
    """Where these records, tuples, mappings or plain values differ.

    Raises StructureError where they differ in kind, length, keys or words.
    """
    first = samples[0]
    if all(
        (sample is first or sample == first) and type(sample) is type(first)  # a NaN is itself
        for sample in samples[1:]
    ):
        return
    kinds = {type(sample) for sample in samples}
    if kinds <= {int, float} or kinds == {str}:
        yield Differing(path, tuple(samples))
        return
    if len(kinds) > 1:
        shown = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise StructureError(f"{_shown(path)}: values of different kinds: {shown}")
    if isinstance(first, (tuple, list)):
        steps: Sequence[Any] = range(len(first))
        if len({len(sample) for sample in samples}) > 1:
            lengths = ", ".join(str(len(sample)) for sample in samples)
            raise StructureError(f"{_shown(path)}: of different lengths: {lengths}")
    elif isinstance(first, Mapping):
        steps = list(first)
        if any(list(sample) != steps for sample in samples):
            raise StructureError(f"{_shown(path)}: different keys")
    else:
        kind: Any = type(first)
        names = _field_names(kind)
        if names is None:
            raise StructureError(f"{_shown(path)}: {first!r:.40} and {samples[-1]!r:.40}")
        for name in names:
            yield from differences([getattr(s, name) for s in samples], (*path, name))
        return
    for step in steps:
        yield from differences([sample[step] for sample in samples], (*path, step))


def words_and_numbers(texts: Sequence[str], path: Path) -> tuple[list[str], list[tuple[int, ...]]]:
    """The words between the numbers of equal texts, and the values of each number.

    There is a word before, between and behind all numbers ("" where there is none).  Raises
    StructureError where the words differ.
    """
    words = [_NUMBER.split(text) for text in texts]
    if any(other != words[0] for other in words[1:]):
        raise StructureError(f"{_shown(path)}: {texts[0]!r:.60} and {texts[-1]!r:.60}")
    numbers = [[int(n.replace(",", "")) for n in _NUMBER.findall(text)] for text in texts]
    return words[0], list(zip(*numbers, strict=True))


def has_commas(texts: Sequence[str]) -> bool:
    """Whether large numbers in these texts have commas."""
    return any("," in number for text in texts for number in _NUMBER.findall(text))


Tree = dict[Any, Any]
"""Changes by the first step to them: more steps, or a new value in a `Leaf`."""


class Leaf(NamedTuple):
    """A new value."""

    value: Any


def tree_of(changes: Mapping[Path, Any]) -> Tree:
    """New values by path, as a tree."""
    tree: Tree = {}
    for path, value in changes.items():
        inner = tree
        for step in path[:-1]:
            inner = inner.setdefault(step, {})
        inner[path[-1]] = Leaf(value)
    return tree


def changed(item: Any, tree: Tree | Leaf) -> Any:
    """A copy of a record with new values; what does not change is shared."""
    if isinstance(tree, Leaf):
        return tree.value
    if isinstance(item, tuple):
        parts = list(item)
        for step, inner in tree.items():
            parts[step] = changed(parts[step], inner)
        return tuple(parts)
    if isinstance(item, list):
        return [changed(part, tree[i]) if i in tree else part for i, part in enumerate(item)]
    if isinstance(item, Mapping):
        return {key: changed(v, tree[key]) if key in tree else v for key, v in item.items()}
    values = {name: changed(getattr(item, name), inner) for name, inner in tree.items()}
    if isinstance(item, msgspec.Struct):
        return msgspec.structs.replace(item, **values)
    return replace(item, **values)


@cache
def _field_names(kind: type) -> tuple[str, ...] | None:
    if issubclass(kind, msgspec.Struct):
        return tuple(kind.__struct_fields__)
    return tuple(item.name for item in fields(kind)) if is_dataclass(kind) else None


def _shown(path: Path) -> str:
    return ".".join(map(str, path)) or "the graph"
