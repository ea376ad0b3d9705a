"""A model cut into stages: each has some of the layers, the first the embedding, the last the head.

Layers that are not of a stage become modules that return their input, as in transformers'
pipelines, so that the paths of all others stay.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rooftrace.errors import RequestError
from rooftrace.graph import OpGraph


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
    """Stands for a module of another stage, which returns so many things besides hidden states."""

    def __init__(self, others: int = 0) -> None:
        super().__init__()
        self.others = others

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The first of the arguments that is of real numbers."""
        hidden = next(
            x
            for x in (*args, *kwargs.values())
            if isinstance(x, torch.Tensor) and x.is_floating_point()
        )
        return (hidden, *[None] * self.others) if self.others else hidden


class _Nothing(nn.Module):
    """Stands for an embedding of positions, which the first stage has added."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A zero."""
        return torch.zeros((), dtype=torch.bfloat16)


def split(model: Any, count: int) -> list[Stage]:
    """The distinct stages of a model cut into `count`, each standing for all that are like it.

    Layers are spread evenly, with one more in the first stages.  Raises RequestError for a model
    without a list of layers, or with fewer layers than stages.
    """
    layers = layers_of(model)
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


def base_of(model: Any) -> Any:
    """The part of a model that has the layers."""
    part = getattr(model, getattr(model, "base_model_prefix", "") or "model", None)
    return getattr(model, "model", model) if part is None else part


def layers_of(model: Any) -> nn.ModuleList:
    """The list of layers: the longest list of modules that the base of a model has, or the one part
    of it that has lists (the encoder of BERT)."""
    inside, lists = [base_of(model)], list[nn.ModuleList]()
    while len(inside) == 1 and not lists:
        children = list(inside[0].children())
        lists = [m for m in children if isinstance(m, nn.ModuleList)]
        inside = [c for c in children if any(isinstance(m, nn.ModuleList) for m in c.modules())]
    if not lists:
        raise RequestError(
            f"{type(model).__name__} has no list of layers to cut into stages: pass stages of your "
            "own"
        )
    return max(lists, key=len)


def _code(module: nn.Module) -> str:
    return textwrap.dedent(inspect.getsource(type(module).forward))


Place = tuple[nn.Module, str]
"""A part of a model: the module that has it, and its name there."""


def ends_of(model: Any) -> tuple[list[Place], list[Place]]:
    """The parts that the code of a model runs before its layers, and those after them."""
    owner, layers = base_of(model), layers_of(model)
    before, after = list[Place](), list[Place]()
    while owner is not layers:
        inner = next(n for n, child in owner.named_children() if layers in child.modules())
        code = _code(owner)
        start = code.find(f"self.{inner}")
        for name, _ in owner.named_children():
            place = code.find(f"self.{name}(")
            if place >= 0 and name != inner:
                (before if place < start else after).append((owner, name))
        owner = getattr(owner, inner)
    return before, after


def keep(model: Any, stage: Stage) -> None:
    """Leave only one stage of a model, in place; all but the first take `inputs_embeds`."""
    base, layers, embedding = base_of(model), layers_of(model), model.get_input_embeddings()
    (before, after), others = ends_of(model), _others(layers[0])
    for number in range(len(layers)):
        if number not in stage.layers:
            layers[number] = _Passing(others)
    tied = stage.is_last and getattr(model.config, "tie_word_embeddings", False)
    for owner, name in () if stage.is_first else before:
        part = getattr(owner, name)
        if part is not embedding and embedding in part.modules():
            part.forward = _Passing().forward
            inside = [(part, child) for child, _ in part.named_children()]
        else:
            inside = [(owner, name)]
        for parent, child in inside:
            _empty(parent, child, embedding, kept=tied)
    if stage.is_last:
        return
    for owner, name in after:
        _empty(owner, name, embedding, kept=False)
    for part in set(model.modules()) - set(base.modules()):  # what has a head, or parts of one
        for name, child in part.named_children():
            part._parameters.clear()
            if child is not base and not any(True for _ in child.children()):
                _empty(part, name, embedding, kept=False)
    model.forward = functools.partial(_hidden, base.forward if base is model else base)


def _others(layer: nn.Module) -> int:
    """How many things the code of a layer returns besides hidden states."""
    returned = (n.value for n in ast.walk(ast.parse(_code(layer))) if isinstance(n, ast.Return))
    return max(len(value.elts) - 1 if isinstance(value, ast.Tuple) else 0 for value in returned)


def _empty(owner: nn.Module, name: str, embedding: nn.Module, *, kept: bool) -> None:
    """Leave out a part that the first stage has; kept: but for the embedding."""
    part = getattr(owner, name)
    if part is embedding:
        if not kept:
            setattr(owner, name, _Passing())
    elif isinstance(part, nn.Embedding):
        setattr(owner, name, _Nothing())
    elif isinstance(part, nn.Dropout) or any(True for _ in part.parameters()):
        setattr(owner, name, _Passing())


def _hidden(base: Any, **kwargs: Any) -> Any:
    """The hidden states that a stage sends to the next one."""
    kwargs.pop("labels", None)
    kwargs.pop("logits_to_keep", None)
    return base(**kwargs).last_hidden_state


def inputs_of(inputs: Any, model: Any, stage: Stage) -> Any:
    """The inputs of a stage: tokens for the first, else hidden states; labels for the last."""
    if stage.is_last:
        inputs = inputs.trained(model)
    labels = dict(inputs.labels) if stage.is_last else {"use_cache": False}
    kwargs = dict(inputs.kwargs)
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


def of_process(inputs: Any, model: Any) -> Any:
    """The inputs of a stage, whose hidden states are those of a part of the positions."""
    hidden, parts = inputs.kwargs.get("inputs_embeds"), getattr(model, "sequence_parts", 1)
    if hidden is None or parts == 1:
        return inputs
    batch, positions, width = hidden.shape
    part = hidden.new_empty(batch, positions // parts, width).requires_grad_()
    return replace(inputs, kwargs={**inputs.kwargs, "inputs_embeds": part})


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
