"""A model cut into stages: each has some of the layers, the first the embedding, the last the head.

Layers that are not of a stage become modules that return their input, as in transformers'
pipelines, so that the paths of all others stay.
"""

from __future__ import annotations

import functools
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
    """Stands for a module of another stage."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The first argument."""
        return args[0] if args else next(iter(kwargs.values()))


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
    """The list of layers: the longest list of modules that the base of a model has."""
    lists = [m for m in base_of(model).children() if isinstance(m, nn.ModuleList)]
    if not lists:
        raise RequestError(
            f"{type(model).__name__} has no list of layers to cut into stages: pass stages of your "
            "own"
        )
    return max(lists, key=len)


def keep(model: Any, stage: Stage) -> None:
    """Leave only one stage of a model, in place; all but the first take `inputs_embeds`."""
    base, layers = base_of(model), layers_of(model)
    ends = [name for name, part in base.named_children() if part is not layers]
    embedding = model.get_input_embeddings()
    for number in range(len(layers)):
        if number not in stage.layers:
            layers[number] = _Passing()
    tied = getattr(model.config, "tie_word_embeddings", False)
    others = [n for n in ends if isinstance(getattr(base, n), nn.Embedding | nn.Dropout)]
    ends = [name for name in ends if name not in others or getattr(base, name) is embedding]
    for name in () if stage.is_first else others:
        part = getattr(base, name)
        if part is not embedding:
            setattr(base, name, _Passing() if isinstance(part, nn.Dropout) else _Nothing())
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
