"""A model cut into stages: each has some of the layers, the first the embedding, the last the head.

Layers that are not of a stage become modules that return their input, as in transformers'
pipelines, so that the paths of all others stay.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import msgspec
import torch
from torch import nn

from rooftrace.errors import RequestError
from rooftrace.graph import Assumption, Op, OpGraph, Ref, Repeat, split as place_of
from rooftrace.graph.records import below
from rooftrace.tracer.repeats.arguments import differences
from rooftrace.tracer.repeats.outside import Watch


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a pipeline, and others that are like it."""

    index: int
    count: int  # how many stages there are
    layers: range
    alike: tuple[int, ...]  # the stages that have as many layers, and the same ends

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the head."""
        return self.index == self.count - 1


class _Passing(nn.Identity):
    """Stands for a module of another stage."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The first argument."""
        return args[0] if args else next(iter(kwargs.values()))


def split(model: Any, count: int) -> list[Stage]:
    """The distinct stages of a model cut into `count`, each standing for all that are like it.

    Layers are spread evenly, with one more in the first stages.  Raises RequestError for a model
    without a list of layers, or with fewer layers than stages.
    """
    layers = _layers(model)
    if len(layers) < count:
        raise RequestError(
            f"{type(model).__name__} has {len(layers)} layers: expected at least one for each of "
            f"{count} stages of the pipeline"
        )
    least, more = divmod(len(layers), count)
    places, start = [], 0
    for index in range(count):
        size = least + (index < more)
        places.append(range(start, start + size))
        start += size
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for index, place in enumerate(places):
        kinds.setdefault((_look(layers, place), index == 0, index == count - 1), []).append(index)
    return [
        Stage(members[0], count, places[members[0]], tuple(members)) for members in kinds.values()
    ]


def _look(layers: nn.ModuleList, place: range) -> tuple[Any, ...]:
    """A key of the cost of these layers: their classes, and the sizes of their weights."""
    return tuple(
        (type(layers[n]).__name__, tuple(tuple(p.shape) for p in layers[n].parameters()))
        for n in place
    )


def _base(model: Any) -> Any:
    """The part of a model that has the layers."""
    prefix = getattr(model, "base_model_prefix", "")
    return getattr(model, prefix, model) if prefix else model


def _layers(model: Any) -> nn.ModuleList:
    """The list of layers: the longest list of modules that the base of a model has."""
    lists = [m for m in _base(model).children() if isinstance(m, nn.ModuleList)]
    if not lists:
        raise RequestError(
            f"{type(model).__name__} has no list of layers to cut into stages: pass stages of your "
            "own"
        )
    return max(lists, key=len)


def keep(model: Any, stage: Stage) -> None:
    """Leave only one stage of a model, in place; all but the first take `inputs_embeds`."""
    base, layers = _base(model), _layers(model)
    ends = [name for name, part in base.named_children() if part is not layers]
    embedding = model.get_input_embeddings()
    for number in range(len(layers)):
        if number not in stage.layers:
            layers[number] = _Passing()
    tied = getattr(model.config, "tie_word_embeddings", False)
    if not stage.is_first and not (tied and stage.is_last):
        _replace(base, embedding)
    if stage.is_last:
        return
    for name in ends[ends.index(_name_in(base, embedding)) + 1 :] if stage.is_first else ends:
        part = getattr(base, name)
        if any(True for _ in part.parameters()) and part is not embedding:
            setattr(base, name, _Passing())
    head = model.get_output_embeddings()
    if head is not None:
        _replace(model, head)
    model.forward = functools.partial(_hidden, base)


def _hidden(base: Any, **kwargs: Any) -> Any:
    """The hidden states that a stage sends to the next one."""
    kwargs.pop("labels", None)
    kwargs.pop("logits_to_keep", None)
    return base(**kwargs).last_hidden_state


def _name_in(parent: Any, child: nn.Module) -> str:
    return next((name for name, part in parent.named_children() if part is child), "")


def _replace(parent: nn.Module, child: nn.Module) -> None:
    """Put a module that passes its argument on in the place of a child."""
    for owner in parent.modules():
        for name, part in list(owner.named_children()):
            if part is child:
                setattr(owner, name, _Passing())


def inputs_of(inputs: Any, model: Any, stage: Stage) -> Any:
    """The inputs of a stage: tokens for the first, else hidden states; labels for the last."""
    if stage.is_last:
        inputs = inputs.trained(model)
    kwargs, labels = dict(inputs.kwargs), dict(inputs.labels) if stage.is_last else {}
    ids = kwargs.get("input_ids")
    if ids is None:
        raise RequestError(
            f"{type(model).__name__} takes no input_ids: pipelines are cut for models of tokens"
        )
    if not stage.is_first:
        del kwargs["input_ids"]
        width = model.config.get_text_config().hidden_size
        kwargs["inputs_embeds"] = torch.empty(
            *ids.shape, width, dtype=model.dtype, device="meta", requires_grad=True
        )
    return replace(inputs, kwargs=kwargs, labels=labels, find_labels=None)


def with_stage(graph: OpGraph, stage: Stage, schedule: str, microbatches: int) -> OpGraph:
    """The graph of a stage, which says of which stages it is and its outputs to the next."""
    hidden = [value for value in map(graph.values.__getitem__, graph.outputs) if value.shape]
    handed = max((v.nbytes for v in hidden if v.role == "activations"), default=0)
    facts = {
        "stages": list(stage.alike),
        "stage_count": stage.count,
        "schedule": schedule,
        "microbatches": microbatches,
        "handed": 0 if stage.is_last else handed,
    }
    return graph.replace(workload={**graph.workload, **facts})


# -- fewer layers ----------------------------------------------------------------------------------
# Of alike layers one stands in a graph for all.  A few of them have the same graph as many, but for
# numbers: they are traced in place of the whole model, and their graph is stretched.

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
        self._layer = layers[first]
        watched = differences(layers[first], layers[first + 1]) or frozenset()
        self.watch = Watch(self._layer, watched)
        del layers[first + _KEPT : first + count]

    def stretched(self, graph: OpGraph) -> OpGraph | None:
        """The graph of all layers, from that of the few; None where it may be another one."""
        from rooftrace.tracer.phases.attempts import describe

        known = set(_COUNTS) | {"name", "class", "dtype"}
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
        layer = describe(self._layer)
        more = {name: graph.model[name] + self.removed * layer[name] for name in _COUNTS}
        return stretched.replace(model={**graph.model, **more})


def shorten(model: Any) -> Shortened | None:
    """Remove alike layers of a model; None where there are too few to save time."""
    try:
        layers = _layers(model)
    except RequestError:
        return None
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


def _follow(one: nn.Module, other: nn.Module) -> bool:
    """Whether two layers differ in nothing but their number."""
    places = differences(one, other)
    if places is None:
        return False
    for path, name in places:
        values = [vars(layer.get_submodule(path))[name] for layer in (one, other)]
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
        repeat = msgspec.structs.replace(
            self._repeat, count=count, names=self._names, assumptions=assumptions
        )
        return source.replace(
            values=tuple(
                msgspec.structs.replace(value, name=self._name(value.name))
                for value in source.values
            ),
            ops=tuple(map(self._op, source.ops)),
            modules=self._modules(),
            assumptions=self._assumptions(repeat),
            constants={self._name(name): text for name, text in source.constants.items()},
            repeats=(repeat,),
        )

    def _more_names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        found = [_COUNTED.fullmatch(name) for name in names]
        if not all(found) or len({match[1] for match in found if match}) != 1:
            raise ValueError(f"{names[0]}: names of iterations do not count")
        numbers = [int(match[2]) for match in found if match]
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
        place = place_of(path, self._container)
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
            made[number] = msgspec.structs.replace(item, id=number, where=where)
        for numbers in repeat.assumptions.values():
            first = made[numbers[0]]
            for q in range(self._repeat.count, repeat.count):
                where = repeat.path(first.where, q)
                made[numbers[q]] = msgspec.structs.replace(first, id=numbers[q], where=where)
        return tuple(made[number] for number in sorted(made))

    def _modules(self) -> dict[str, str]:
        made: dict[str, str] = {}
        last = {
            path: kind
            for path, kind in self._source.modules.items()
            if (place := place_of(path, self._container)) and place[0] == self._end - 1
        }
        for path, kind in self._source.modules.items():
            made[self._path(path)] = kind
            if path == next(reversed(last), None):
                for q in range(1, self._more + 1):
                    for there, inner in last.items():
                        place = place_of(there, self._container)
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
        return msgspec.structs.replace(op, **changes) if changes else op

    def _arguments(self, op: Op) -> dict[str, Any] | None:
        """Numbers of an op on lists of tensors: one for each."""
        values = self._source.values
        lists = [item for item in op.arguments.values() if type(item) is tuple and item]
        refs = [item for item in lists if all(type(part) is Ref for part in item)]
        repeated = {sum(bool(values[ref.id].repeats) for ref in item) for item in refs} - {0}
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
