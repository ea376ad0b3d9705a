"""A model cut into stages, and its experts among processes.

A stage has some of the layers, the first the embedding, the last the head.

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


# -- parts of weights ------------------------------------------------------------------------------


def check_divides(axis: str, processes: int, number: int, what: str) -> None:
    """Raise RequestError where so many things cannot be spread evenly over an axis of a mesh."""
    if number % processes:
        fitting = [str(size) for size in range(2, number + 1) if not number % size]
        raise RequestError(
            f"--mesh {axis}={processes}: {number:,} {what} cannot be spread evenly over it; sizes "
            f"that divide them are {', '.join(fitting)} (copies are not modelled)"
        )


def put(module: nn.Module, name: str, part: torch.Tensor) -> None:
    """Put a part of a weight in its place."""
    gradient = module.get_parameter(name).requires_grad
    setattr(module, name, nn.Parameter(part.detach().clone(), requires_grad=gradient))


# -- experts ---------------------------------------------------------------------------------------

PACKED, DOWN = "gate_up_proj", "down_proj"
"""Weights of all experts: [experts, 2 channels, hidden] and [experts, hidden, channels], or these
turned."""


def has_experts(module: nn.Module) -> bool:
    """Whether a module has the weights of many experts, and takes tokens with their choices."""
    weights = (getattr(module, name, None) for name in (PACKED, DOWN))
    packed = all(isinstance(w, nn.Parameter) and w.dim() == 3 for w in weights)
    return packed and hasattr(module, "is_transposed")


def added_to_experts(block: nn.Module) -> list[str]:
    """The children of a block whose results are added to those of its experts."""
    if not any(has_experts(child) for child in block.children()):
        return []
    return [
        name
        for name, child in block.named_children()
        if isinstance(down := getattr(child, DOWN, None), nn.Linear) and down.bias is None
    ]


def cut_experts(model: nn.Module, tp: Any, replicas: Any, parts: int) -> None:
    """Leave each process its part of the experts of a model that does not train.

    parts: "ep", among how many processes experts are spread; the others split each of them.  The
    processes of `tp` have the same tokens: what their experts make of them is added up, together
    with what shared experts do, by one all-reduce.  replicas: processes with other tokens, which
    they gather before a block of experts, and of whose sums each gets its own by a
    reduce-scatter, as SGLang does with --enable-dp-attention (`prepare_mlp` of its
    layers/communicator.py); shared experts are split as a routed one by all.  None: no such.
    """
    number = 1 if replicas is None else replicas.size()
    rank = tp.get_local_rank() + (replicas.get_local_rank() * tp.size() if number > 1 else 0)
    slices = number * tp.size() // parts
    check_divides("ep", parts, number * tp.size(), "processes of tp" + " x dp" * (number > 1))
    for block in list(model.modules()):
        for experts in filter(has_experts, block.children()):
            _cut(experts, rank % parts, parts, rank // parts, slices)
            shared = added_to_experts(block)
            if number > 1:
                for name in shared:
                    _cut_shared(getattr(block, name), rank, number * tp.size())
                _gather_tokens(block, replicas)
            if tp.size() > 1:
                reduce_results(block if shared or number > 1 else experts, tp.get_group())


def _cut_shared(block: Any, rank: int, processes: int) -> None:
    """Keep one of so many equal parts of the channels of a shared expert."""
    check_divides("tp", processes, block.down_proj.in_features, "channels of a shared expert")
    for name, layer in block.named_children():
        if isinstance(layer, nn.Linear):
            dim = 1 if name == DOWN else 0
            put(layer, "weight", layer.weight.chunk(processes, dim)[rank])
            layer.out_features, layer.in_features = layer.weight.shape


def _gather_tokens(block: Any, replicas: Any) -> None:
    """Give a block the tokens of all replicas, and each of these the sums of its own."""
    forward, many = block.forward, replicas.size()
    ops, group = torch.ops._c10d_functional, replicas.get_group().group_name

    def of_all(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        gathered = ops.all_gather_into_tensor(hidden.contiguous(), many, group)
        result = forward(ops.wait_tensor(gathered), *args, **kwargs)
        first, *others = result if isinstance(result, tuple) else (result,)
        own = ops.wait_tensor(ops.reduce_scatter_tensor(first.contiguous(), "sum", many, group))
        return (own, *others) if isinstance(result, tuple) else own

    block.forward = of_all


def _cut(experts: Any, place: int, parts: int, number: int, slices: int) -> None:
    """Keep the experts with this place among `parts`, of each the channels of one slice.

    With weights of [experts, in, out] the channels of a gate and of the rest alternate, as in
    gpt-oss; else they follow each other.
    """
    turned, down = experts.is_transposed, experts.down_proj
    check_divides("ep", parts, len(down), "experts")
    check_divides("tp", slices, down.shape[1 if turned else 2], "channels")
    count = len(down) // parts
    some = slice(place * count, (place + 1) * count)
    for name, weight in list(experts.named_parameters(recurse=False)):
        part = weight[some]
        if name.startswith(PACKED):
            dim = part.dim() - 1 if turned or part.dim() == 2 else 1
            halves = (part,) if turned else part.chunk(2, dim)
            part = torch.cat([half.chunk(slices, dim)[number] for half in halves], dim)
        elif name == DOWN:
            part = part.chunk(slices, 1 if turned else 2)[number]
        elif number:  # a bias is added once
            part = torch.zeros_like(part)
        put(experts, name, part)
    if parts > 1:
        experts.num_experts = count
        experts._is_expert_parallel = True  # rows of other experts are masked
        _mask_others(experts, place, count)


def _mask_others(experts: Any, place: int, count: int) -> None:
    """Let experts take the rows of their own, and leave out all others."""
    forward = experts.forward

    def of_own(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Any:
        others = chosen // count != place
        local = torch.where(others, count, chosen % count)
        return forward(hidden, local, weights.masked_fill(others, 0.0))

    experts.forward = of_own


def reduce_results(module: Any, group: Any) -> None:
    """Add up the results of a module over a group: of several, the first."""
    forward = module.forward

    def reduced(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        first = result[0] if isinstance(result, tuple) else result
        torch.distributed.all_reduce(first, group=group)
        return result

    module.forward = reduced
