"""A few alike layers that are traced for all of them, over a mesh.

Of alike layers one stands in a graph for all: see `lowering.stacks`.  A model of a few of
them has the same graph as one of many, but for numbers: it is traced in place of the whole, and its
graph is stretched.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from msgspec.structs import replace
from torch import nn

from rooftrace.graph import Assumption, Op, OpGraph, Ref, Repeat, split
from rooftrace.graph.records import below
from rooftrace.tracer.repeats.arguments import differences
from rooftrace.tracer.repeats.outside import Watch

_KEPT = 7
"""Alike layers that are traced: three that a repeat stands for, and two at either end, around which
FSDP gathers ahead and drops behind."""
_COUNTS = ("params", "params_trainable", "bytes_parameters", "bytes_buffers")
_COUNTED = re.compile(r"(.*_)(\d+)")


class Shortened:
    """A model without most of its alike layers, in place.

    removed: how many are gone, behind the `_KEPT` first ones.  first: the number of the first one.
    """

    def __init__(self, model: Any, layers: nn.ModuleList, first: int, count: int) -> None:
        self.first, self.removed = first, count - _KEPT
        self.container = next(path for path, part in model.named_modules() if part is layers)
        self.layer = layers[first]
        watched = differences(layers[first], layers[first + 1]) or frozenset()
        self.watch = Watch(self.layer, watched)
        del layers[first + _KEPT : first + count]

    def stretched(self, graph: OpGraph, layer: Mapping[str, Any]) -> OpGraph | None:
        """The graph of all layers, from that of the few; None where it may be another one.

        layer: counts of the parameters of one of them.
        """
        known = set(_COUNTS) | {"name", "class", "dtype", "config"}
        if self.watch.read or not graph.model.keys() <= known or len(graph.repeats) != 1:
            return None
        (repeat,) = graph.repeats
        inside = self.first <= repeat.first and repeat.first + repeat.count < self.first + _KEPT
        if repeat.container != self.container or repeat.step != 1 or not inside:
            return None
        try:
            stretched = _Stretched(graph, repeat, self.removed).graph()
        except ValueError:
            return None
        more = {name: graph.model[name] + self.removed * layer[name] for name in _COUNTS}
        return stretched.replace(model={**graph.model, **more})


def shorten(model: Any, layers: nn.ModuleList) -> Shortened | None:
    """Remove alike layers of a model; None where there are too few to save time."""
    config = vars(model.config.get_text_config()).values()
    listed = (value for value in config if isinstance(value, list) and len(value) >= len(layers))
    if any(item != value[0] for value in listed for item in value):
        return None  # code may look there by a layer's place
    best, start = (0, 0), 0
    for number in range(len(layers)):
        if not (number > start and _follow(layers[number - 1], layers[number])):
            start = number
        if any(True for _ in layers[number].parameters()):
            best = max(best, (number + 1 - start, -start))
    count, first = best[0], -best[1]
    return Shortened(model, layers, first, count) if count >= 2 * _KEPT else None


def _follow(layer: nn.Module, after: nn.Module) -> bool:
    """Whether two layers differ in nothing but their number."""
    places = differences(layer, after)
    if places is None:
        return False
    for path, name in places:
        values = [vars(part.get_submodule(path))[name] for part in (layer, after)]
        if not all(type(value) is int for value in values) or values[1] - values[0] != 1:
            return False
    return True


class _Stretched:
    """A graph whose repeat stands for so many more iterations; what comes behind moves on.

    Raises ValueError where numbers do not go on evenly.
    """

    def __init__(self, graph: OpGraph, repeat: Repeat, more: int) -> None:
        self._source, self._repeat, self._more = graph, repeat, more
        self._end = repeat.first + repeat.count
        assert repeat.container is not None
        self._container = repeat.container
        self._counters: dict[str, tuple[int, int]] = {}  # last number of a prefix, and its step
        self._names = {value: self._more_names(names) for value, names in repeat.names.items()}
        ids = [_evenly(numbers) for numbers in repeat.assumptions.values()]
        if any(step != len(ids) for step in ids):
            raise ValueError("assumptions of layers do not follow each other")
        self._last = max((max(numbers) for numbers in repeat.assumptions.values()), default=-1)
        self._added = len(ids) * more

    def graph(self) -> OpGraph:
        """The longer graph."""
        source, count = self._source, self._repeat.count + self._more
        assumptions = {
            mine: tuple(numbers[0] + q * len(self._repeat.assumptions) for q in range(count))
            for mine, numbers in self._repeat.assumptions.items()
        }
        repeat = replace(self._repeat, count=count, names=self._names, assumptions=assumptions)
        return source.replace(
            values=tuple(replace(value, name=self._name(value.name)) for value in source.values),
            ops=tuple(map(self._op, source.ops)),
            modules=self._modules(),
            assumptions=self._assumptions(repeat),
            constants={self._name(name): text for name, text in source.constants.items()},
            repeats=(repeat,),
        )

    def _more_names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        counted = [_COUNTED.fullmatch(name) for name in names]
        if not all(counted) or len({match[1] for match in counted if match}) != 1:
            raise ValueError(f"{names[0]}: names of iterations do not count")
        numbers = [int(match[2]) for match in counted if match]
        prefix, step = names[0][: -len(str(numbers[0]))], _evenly(numbers)
        last, known = self._counters.get(prefix, (-1, step))
        if known != step:
            raise ValueError(f"{prefix}: names of iterations count unevenly")
        self._counters[prefix] = max(last, numbers[-1]), step
        total = len(names) + self._more
        return tuple(f"{prefix}{numbers[0] + q * step}" for q in range(total))

    def _name(self, name: str) -> str:
        match = _COUNTED.fullmatch(name)
        last, step = self._counters.get(match[1], (0, 0)) if match else (0, 0)
        if match and step and int(match[2]) > last:
            return f"{match[1]}{int(match[2]) + step * self._more}"
        return self._path(name)

    def _path(self, path: str) -> str:
        place = split(path, self._container)
        if place is None or place[0] < self._end:
            return path
        return below(self._container, f"{place[0] + self._more}{place[1]}")

    def _assumed(self, number: int) -> int:
        return number + self._added * (number > self._last)

    def _assumptions(self, repeat: Repeat) -> tuple[Assumption, ...]:
        made = {}
        for item in self._source.assumptions:
            number = self._assumed(item.id)
            where = self._path(item.where)
            made[number] = replace(item, id=number, where=where)
        for numbers in repeat.assumptions.values():
            first = made[numbers[0]]
            for q in range(self._repeat.count, repeat.count):
                where = repeat.path(first.where, q)
                made[numbers[q]] = replace(first, id=numbers[q], where=where)
        return tuple(made[number] for number in sorted(made))

    def _modules(self) -> dict[str, str]:
        made: dict[str, str] = {}
        last = {
            path: kind
            for path, kind in self._source.modules.items()
            if (place := split(path, self._container)) and place[0] == self._end - 1
        }
        for path, kind in self._source.modules.items():
            made[self._path(path)] = kind
            if path == next(reversed(last), None):
                for q in range(1, self._more + 1):
                    for there, inner in last.items():
                        place = split(there, self._container)
                        assert place is not None
                        made[below(self._container, f"{place[0] + q}{place[1]}")] = inner
        return made

    def _op(self, op: Op) -> Op:
        changes: dict[str, Any] = {}
        path = self._path(op.module)
        if path != op.module:
            changes["module"] = path
        assumed = tuple(map(self._assumed, op.assumptions))
        if assumed != op.assumptions:
            changes["assumptions"] = assumed
        if not op.repeats and (arguments := self._arguments(op)) is not None:
            changes["arguments"] = arguments
        return replace(op, **changes) if changes else op

    def _arguments(self, op: Op) -> dict[str, Any] | None:
        """Numbers of an op on lists of tensors of all iterations: one for each tensor."""
        lists = [item for item in op.arguments.values() if type(item) is tuple]
        repeated = {sum(type(part) is Ref and part.every for part in item) for item in lists} - {0}
        if not repeated:
            return None
        changed = {}
        for name, item in op.arguments.items():
            if type(item) is tuple and item and type(item[0]) in (int, float):
                if len(set(item)) > 1 or len(repeated) > 1:
                    raise ValueError(f"{op.target}: numbers of layers differ")
                changed[name] = item + item[:1] * (max(repeated) * self._more)
        return {**op.arguments, **changed} if changed else None


def _evenly(numbers: Sequence[int]) -> int:
    """The step of numbers that go on evenly.  Raises ValueError for others."""
    steps = {after - before for before, after in pairwise(numbers)}
    if len(steps) != 1:
        raise ValueError(f"{numbers}: expected even steps")
    return steps.pop()
