"""Sequence parallelism: processes of "tp" share the positions of a sequence in training.

Each has a part of them wherever nothing else is cut: all-gather before a block, reduce-scatter
after it (Korthikanti et al., arXiv:2205.05198, section 4.2).
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from rooftrace.errors import RequestError
from rooftrace.graph import pattern_of
from rooftrace.tracer.sharding.plans import (
    CUT,
    DOWN,
    WHOLE,
    Peers,
    around,
    check_divides,
    cut_words,
    entered,
    own_rows,
    put_part,
)
from rooftrace.tracer.sharding.splitting import base_of, ends_of, layers_of


class _Exchanged(torch.autograd.Function):
    """A tensor as one function exchanges it; another exchanges its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Any, back: Any) -> torch.Tensor:
        ctx.back = back
        return there(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.back(grads[0]), None, None


_HALVES = ("packed_colwise", "packed_rowwise")
_CUT = {"colwise": -2, "rowwise": -1, "packed_colwise": -2, "packed_rowwise": -1}
"""The dimension that a style of transformers cuts; a vector has one."""
_ADDED = ("rowwise", "packed_rowwise")
"""Styles whose results all processes add up."""
_UNCUT = (
    "replicated_with_grad_allreduce", "mla_kv_a_proj", "moe_tp_experts", "all_reduce", CUT,
    WHOLE,
)  # fmt: skip
"""Styles of parts of a block that all processes have whole, or whose weights have styles."""


def why_sequences_stay(model: Any, styles: Mapping[str, str], experts: Collection[str] = ()) -> str:
    """The part of a model that `cut_sequences` cannot take, as a clause; "" where it can.

    styles: of modules and weights, by their paths; experts: paths of those that get their rows from
    all processes.
    """
    head, names = model.get_output_embeddings(), {m: n for n, m in model.named_modules()}
    if head is None:
        return "there is no head"
    for part in names.keys() - set(base_of(model).modules()) - {head}:
        if any(True for _ in part.parameters(recurse=False)):
            return f"{pattern_of(names[part])} is whole"
    try:
        layers = layers_of(model)
    except RequestError:
        return "there is no list of layers"
    for layer in layers:
        for name, weight in layer.named_parameters():
            path, child = f"{names[layer]}.{name}", f"{names[layer]}.{name.partition('.')[0]}"
            if any(path.startswith(f"{child}.") for path in experts):
                continue
            if _is_block(child, styles):
                block = model.get_submodule(child)
                if not any(style in _ADDED for style in _styles_in(child, styles)):
                    return f"what {pattern_of(child)} returns is cut"
                if "residual" in inspect.signature(block.forward).parameters:
                    return f"{pattern_of(child)} adds its results to a residual"
            elif weight.dim() > 1 or path == child:
                return f"{pattern_of(path)} is whole"
    for name, style in styles.items():
        if "." in name and pattern_of(name) != name and style not in (*_CUT, *_UNCUT):
            return f"{pattern_of(name)} is {style}"
    return ""


def _styles_in(path: str, styles: Mapping[str, str]) -> list[str]:
    return [style for name, style in styles.items() if name.startswith(f"{path}.")]


def _is_block(path: str, styles: Mapping[str, str]) -> bool:
    """Whether a child of a layer has parts that are cut."""
    return any(style in _CUT for style in _styles_in(path, styles))


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def cut_sequences(
    model: Any,
    mesh: Any,
    styles: Mapping[str, str],
    *,
    makes_loss: bool = True,
    experts: Collection[str] = (),
) -> None:
    """Shard a model that trains, in place, with its sequences wherever nothing else is cut.

    Weights of its blocks are cut by these styles, the vocabulary by rows.  makes_loss: the model
    makes it, of the logits of own words; else logits are gathered.  What all processes have whole
    gets the sum of its gradients.  experts: see `why_sequences_stay`; a process sends them its own
    positions, as in Megatron-LM.
    """
    ranks, names = Peers(mesh), {module: name for name, module in model.named_modules()}
    layers = [layer for layer in layers_of(model) if _has_weights(layer)]
    for layer in layers:
        for child in layer.children():
            path = names[child]
            if any(name.startswith(f"{path}.") for name in experts):
                for part in (part for part in child.children() if names[part] not in experts):
                    _cut_part(part, names[part], styles, ranks, dim=0)  # [tokens, width], too
                own = dict.fromkeys(
                    (name for name, _ in child.named_parameters(recurse=False)), 1.0
                )
                _share_weights(child, own, ranks)
            else:
                _cut_part(child, path, styles, ranks, dim=1)
    is_whole = _cut_ends(model, layers[0], ranks)
    _cut_head(model, ranks, makes_loss, is_whole)


def _cut_part(
    part: nn.Module, path: str, styles: Mapping[str, str], ranks: Peers, dim: int
) -> None:
    """Give a part that is cut the positions of all processes; else let these share its weights."""
    if not _is_block(path, styles):
        return _share(part, ranks)
    gather, scatter = partial(ranks.gather, dim=dim), partial(ranks.scatter, dim=dim)
    _cut_weights(part, path, styles, ranks)
    return around(part, _exchange(gather, scatter), _exchange(scatter, gather))


def _cut_weights(block: nn.Module, path: str, styles: Mapping[str, str], ranks: Peers) -> None:
    """Leave a process its part of the weights of a block."""
    for place, module in list(block.named_modules(prefix=path)):
        shared = dict[str, float]()
        for name, weight in list(module.named_parameters(recurse=False)):
            style = styles.get(f"{place}.{name}", "")
            if style in _CUT and not (weight.dim() == 1 and style in _ADDED):
                dim = max(_CUT[style], -weight.dim())
                check_divides("tp", ranks.size, weight.shape[dim], "channels")
                halves = weight.chunk(2, dim) if style in _HALVES else (weight,)
                parts = [half.chunk(ranks.size, dim)[ranks.rank] for half in halves]
                put_part(module, name, torch.cat(parts, dim))
            elif style != CUT:  # a bias of sums is added once: a share of it by each process
                is_added = style in _ADDED or name == f"{DOWN}_bias"
                shared[name] = 1 / ranks.size if is_added else 1.0
        _share_weights(module, shared, ranks)


def _share(part: nn.Module, ranks: Peers) -> None:
    """Let the weights of a part get the sum of their gradients."""
    for module in part.modules():
        names = (name for name, _ in module.named_parameters(recurse=False))
        _share_weights(module, dict.fromkeys(names, 1.0), ranks)


def _share_weights(module: Any, scales: Mapping[str, float], ranks: Peers) -> None:
    """Let these weights of a module get the sum of their gradients; they count by a scale."""
    forward, share = module.forward, _exchange(_same, ranks.add)

    def shared(*args: Any, **kwargs: Any) -> Any:
        before = {name: module._parameters[name] for name in scales}
        for name, scale in scales.items():
            lent = share(before[name])
            module._parameters[name] = lent if scale == 1 else lent * scale
        try:
            return forward(*args, **kwargs)
        finally:
            module._parameters.update(before)

    if scales:
        module.forward = shared


def _exchange(there: Any, back: Any) -> Any:
    loose: Any = _Exchanged
    return lambda x: loose.apply(x, there, back)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _cut_ends(model: Any, first: nn.Module, ranks: Peers) -> bool:
    """Cut the embedding, and the hidden states that enter the first layer of a process.

    Returns whether the last part of the base gathers them.
    """
    ends = [[getattr(owner, name) for owner, name in places] for places in ends_of(model)]
    before, after = ([part for part in parts if _has_weights(part)] for parts in ends)
    for part in after:
        _share(part, ranks)
    # Code of GPT-2 gives what its last norm makes the shape of whole sequences.
    if after:
        around(after[-1], leave=_exchange(ranks.gather, ranks.scatter))
    elif ends[1]:
        _hand_on(model, ends[1][-1], ranks.size)
    embedding: Any = model.get_input_embeddings()
    if isinstance(embedding, nn.Embedding):
        cut_words(embedding, ranks.rank, ranks.size)
    if not _has_weights(layers_of(model)[0]):
        change = _handed(model, ranks.size)
    elif len(before) == 1 and any("Rotary" in type(m).__name__ for m in base_of(model).children()):
        # Positions are turned in attention, and nothing is added to what was looked up.
        change = _exchange(ranks.scatter, ranks.gather)
    else:
        around(embedding, leave=_exchange(ranks.add, _same))
        change = _exchange(ranks.own, ranks.gather)
    enter = partial(entered, change)
    first.register_forward_pre_hook(lambda _, args, kwargs: enter(args, kwargs), with_kwargs=True)
    return bool(after)


def _seen(part: torch.Tensor, size: int) -> torch.Tensor:
    """A tensor of as many positions as all processes have, which code sees in place of a part."""
    batch, positions, width = part.shape
    return part.new_empty(()).expand(batch, positions * size, width)


def _hand_on(model: Any, last: nn.Module, size: int) -> None:
    """Let a stage hand on the part that its last module returns."""
    parts, forward = list[torch.Tensor](), model.forward

    def keep(part: torch.Tensor) -> torch.Tensor:
        parts.append(part)
        return _seen(part, size)

    around(last, leave=keep)
    model.forward = lambda **kwargs: (forward(**kwargs), parts.pop())[1]


def _handed(model: Any, size: int) -> Any:
    """A function that gives the first layer of a stage the part that the stage before handed on.

    Until then the model sees whole sequences.
    """
    parts = list[torch.Tensor]()

    def keep(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        parts.append(part := kwargs["inputs_embeds"])
        return args, {**kwargs, "inputs_embeds": _seen(part, size)}

    model.register_forward_pre_hook(keep, with_kwargs=True)
    model.sequence_parts = size
    return lambda whole: parts.pop()


def _cut_head(model: Any, ranks: Peers, makes_loss: bool, is_whole: bool) -> None:
    """Let each process have the logits of its own words, and of all positions; is_whole: it gets
    the hidden states of all."""
    head: Any = model.get_output_embeddings()
    if not hasattr(head, "out_features"):  # a stage before the last one
        return
    forward, words = head.forward, head.out_features
    for name, weight in list(head.named_parameters()):
        put_part(head, name, own_rows(weight, ranks.rank, ranks.size))
    start = ranks.rank * head.weight.shape[0]
    enter = _same if is_whole else _exchange(ranks.gather, ranks.scatter)
    leave = _exchange(partial(ranks.gather, dim=-1), partial(ranks.own, dim=-1))

    def of_own(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = forward(enter(hidden))
        return logits[..., : words - start] if makes_loss else leave(logits)[..., :words]

    head.forward = of_own
    if makes_loss:
        model.loss_function = partial(_loss, ranks, start)


def _loss(
    ranks: Peers,
    start: int,
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int | None = None,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor:
    """transformers' loss of a causal language model, of the logits of own words."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    told = shift_labels.flatten()
    losses = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits.float().flatten(0, -2), told - start, ranks
    )
    kept = told != ignore_index
    count = kept.sum() if num_items_in_batch is None else num_items_in_batch
    loss: torch.Tensor = losses.masked_fill(~kept, 0.0).sum() / count
    return loss


class _CrossEntropy(torch.autograd.Function):
    """The loss of each row of logits, whose columns are spread over processes."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, words: torch.Tensor, ranks: Peers) -> Any:
        shifted = logits - ranks.add(logits.amax(-1), "max")[:, None]
        others = (words < 0) | (words >= logits.shape[-1])
        column = words.masked_fill(others, 0)[:, None]
        told = ranks.add(shifted.gather(1, column)[:, 0].masked_fill(others, 0.0))
        shares = shifted.exp_()
        total = ranks.add(shares.sum(-1))
        ctx.save_for_backward(shares.div_(total[:, None]), column, others)
        return total.log() - told

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        shares, column, others = ctx.saved_tensors
        own = grads[0].masked_fill(others, 0.0)[:, None]
        return (shares * grads[0][:, None]).scatter_add_(1, column, -own), None, None
