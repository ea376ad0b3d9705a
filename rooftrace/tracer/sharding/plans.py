"""Tensor and expert parallelism as inference engines and Megatron-LM do it.

transformers' plan of DeepSeek leaves attention whole on every process, that of gpt-oss all but the
head, and both add up routed and shared experts one by one.  Here the blocks of a model are found by
their products: some read the hidden states and are cut by columns, one writes them and is cut by
rows (Shoeybi et al., arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from rooftrace.errors import RequestError
from rooftrace.graph import pattern_of
from rooftrace.tracer.sharding.splitting import base_of, layers_of

_COLUMNS = (
    "q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "fc1", "fc_in",
    "wi", "wi_0", "wi_1", "dense_h_to_4h", "w1", "w3",
)  # fmt: skip
"""Names of products that read the hidden states, or the latents, of all heads or channels."""
_ROWS = (
    "o_proj", "out_proj", "down_proj", "fc2", "fc_out", "wo", "dense_4h_to_h", "w2",
)  # fmt: skip
"""Names of products that write the hidden states."""
_OF_HEADS = ("q_proj", "q_b_proj", "k_proj", "v_proj", "kv_b_proj")
_LATENT_KEYS = "kv_a_proj_with_mqa"
_PACKED, _DOWN = "gate_up_proj", "down_proj"
"""Weights of all experts: [experts, 2 channels, hidden] and [experts, hidden, channels], or these
turned."""
_WHOLE = "replicate"
"""transformers' word for a part that every process has whole."""


# -- rules -----------------------------------------------------------------------------------------


def as_engines(model: Any, size: int, *, trains: bool, cut: bool) -> dict[str, str]:
    """Styles of transformers where an engine shards otherwise than its own plan, over `size`.

    Where keys and values have fewer heads than there are processes, each process gets one of them
    (not in training, where no engine does so): they are cut here, in place.  cut: whether
    `cut_experts` follows.  The keys are paths of modules and parameters, with * for the number of
    a layer.  Attention is cut in models of which transformers spreads a layer: code of others may
    count on all heads.  Raises RequestError for heads that do not divide.
    """
    own, rules, joined = set(model.tp_plan or ()), dict[str, str](), dict[str, str]()
    ready = bool(model.ep_plan) or any("*" in name for name in own)
    vocabulary = None if trains else _vocabulary(model, size)
    for path, block in model.named_modules():
        place = pattern_of(path)
        children = {name for name, _ in block.named_children()}
        styles = dict[str, str]()
        if has_experts(block):
            if cut:
                styles = dict.fromkeys(("", *block.state_dict()), _WHOLE)
            elif place not in own:
                styles = dict(_rules_of_experts(block))
        elif _is_fused(block):
            styles = {_PACKED: "packed_colwise", _DOWN: "rowwise"}
        elif not any(f"{place}.{name}" in own for name in children):
            styles = dict(_rules_of(block, children, trains, ready))
        if "k_proj" in children and (f"{place}.k_proj" in own or "k_proj" in styles) and not trains:
            styles |= dict.fromkeys(_cut_heads(model, block, size), _WHOLE)
        for shared in _added_to_experts(block) if cut else ():
            down = f"{place}.{shared}.{_DOWN}"  # whose results are added up with those of experts
            joined |= {down: "local_params", f"{down}.weight": "rowwise"}
        if block is vocabulary:
            styles = dict.fromkeys(("", "weight"), _WHOLE)
        rules |= {f"{place}.{name}".rstrip("."): style for name, style in styles.items()}
    by_heads = [name for name in own | rules.keys() if name.endswith((".q_proj", ".q_b_proj"))]
    if by_heads:
        heads = model.config.get_text_config().num_attention_heads
        check_divides("tp", size, heads, "attention heads")
    return rules | joined


def check_divides(axis: str, processes: int, number: int, what: str) -> None:
    """Raise RequestError where so many things cannot be spread evenly over an axis of a mesh."""
    if number % processes:
        fitting = [str(size) for size in range(2, number + 1) if not number % size]
        raise RequestError(
            f"--mesh {axis}={processes}: {number:,} {what} cannot be spread evenly over it; sizes "
            f"that divide them are {', '.join(fitting)} (copies are not modelled)"
        )


def _rules_of(
    block: nn.Module, children: Collection[str], trains: bool, ready: bool
) -> Iterator[tuple[str, str]]:
    """Styles of the parts of a block, by their name; "" is the block."""
    linear = [name for name in children if isinstance(getattr(block, name), nn.Linear)]
    if not any(name in _ROWS for name in linear) or not any(name in _COLUMNS for name in linear):
        return
    if not ready and any(name in _OF_HEADS for name in linear):
        return
    for name in linear:
        if name in _COLUMNS or name in _ROWS:
            yield name, "colwise" if name in _COLUMNS else "rowwise"
    if trains and _LATENT_KEYS in linear:
        yield _LATENT_KEYS, "mla_kv_a_proj"
    if isinstance(getattr(block, "sinks", None), nn.Parameter):  # a number for each head
        yield "sinks", "colwise"
        yield "", "local_params"


def _is_fused(block: Any) -> bool:
    """Whether one product makes gate and channels of an MLP, one after the other (Phi-3, GLM)."""
    parts = [part for name, part in block.named_children() if name in (_PACKED, _DOWN)]
    sizes = [(p.in_features, p.out_features) for p in parts if isinstance(p, nn.Linear)]
    return len(sizes) == 2 and sizes[0] == (sizes[1][1], 2 * sizes[1][0])


def _rules_of_experts(experts: nn.Module) -> Iterator[tuple[str, str]]:
    turned = experts.is_transposed
    yield _PACKED, "rowwise" if turned else "packed_colwise"
    yield _DOWN, "colwise" if turned else "rowwise"
    if hasattr(experts, f"{_PACKED}_bias"):
        yield f"{_PACKED}_bias", "rowwise"
    yield "", "moe_tp_experts"


# -- vocabulary ------------------------------------------------------------------------------------


def is_tied(model: Any) -> bool:
    """Whether the embedding of tokens and the head have one weight."""
    weights = [
        getattr(part, "weight", None)
        for part in (model.get_input_embeddings(), model.get_output_embeddings())
    ]
    return weights[0] is not None and weights[0] is weights[1]


def _vocabulary(model: Any, size: int) -> nn.Embedding | None:
    """The embedding of tokens, where `cut_vocabulary` cuts it; None where it does not divide, or is
    the weight of a head that stays whole."""
    embedding, own = model.get_input_embeddings(), {model.get_output_embeddings()}
    fits = isinstance(embedding, nn.Embedding) and not embedding.num_embeddings % size
    planned = own & {part for name, part in model.named_modules() if name in (model.tp_plan or ())}
    return embedding if fits and (planned or not is_tied(model)) else None


def cut_vocabulary(model: Any, mesh: Any) -> None:
    """Leave each process of `mesh` an equal part of the rows of the embedding of tokens.

    An all-reduce adds up what they look up.  For steps that do not train.
    """
    embedding: Any = _vocabulary(model, mesh.size())
    if embedding is not None:
        _cut_words(embedding, mesh.get_local_rank(), mesh.size())
        _reduce_results(embedding, mesh.get_group())


def _cut_words(embedding: Any, rank: int, size: int) -> None:
    """Let an embedding look up its own words, and take zeros for all others."""
    forward = embedding.forward
    _put(embedding, "weight", _own_rows(embedding.weight, rank, size))
    count, padding = len(embedding.weight), embedding.padding_idx
    start = rank * count

    def of_own(tokens: torch.Tensor) -> torch.Tensor:
        others = (tokens < start) | (tokens >= start + count)
        rows: torch.Tensor = forward((tokens - start).masked_fill(others, 0))
        return rows.masked_fill(others.unsqueeze(-1), 0.0)

    is_own = padding is not None and start <= padding < start + count
    embedding.forward, embedding.padding_idx = of_own, padding - start if is_own else None


def _own_rows(weight: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The rows of one process, as many for each: rows of zeros fill a vocabulary, as in engines."""
    more = weight.new_zeros(-len(weight) % size, *weight.shape[1:])
    return torch.cat((weight, more)).chunk(size)[rank]


# -- heads -----------------------------------------------------------------------------------------


def _cut_heads(model: Any, attention: Any, size: int) -> list[str]:
    """The products of keys and values that were cut to one head, which several processes share."""
    config = model.config.get_text_config()
    heads, queries = getattr(config, "num_key_value_heads", None), config.num_attention_heads
    if heads is None or not heads % size or size % heads or queries % size:
        return []
    cut = [name for name in ("k_proj", "v_proj") if isinstance(getattr(attention, name), nn.Linear)]
    for name in cut:
        layer = getattr(attention, name)
        width = layer.out_features // heads
        start = torch.distributed.get_rank() % size * heads // size * width
        layer.out_features = width
        for kind, weight in list(layer.named_parameters()):
            _put(layer, kind, weight[start : start + width])
    attention.num_key_value_groups = queries // size
    return cut


def _put(module: nn.Module, name: str, part: torch.Tensor) -> None:
    """Put a part of a weight in its place."""
    gradient = module.get_parameter(name).requires_grad
    setattr(module, name, nn.Parameter(part.detach().clone(), requires_grad=gradient))


# -- experts ---------------------------------------------------------------------------------------


def has_experts(module: nn.Module) -> bool:
    """Whether a module has the weights of many experts, and takes tokens with their choices."""
    weights = (getattr(module, name, None) for name in (_PACKED, _DOWN))
    packed = all(isinstance(w, nn.Parameter) and w.dim() == 3 for w in weights)
    return packed and hasattr(module, "is_transposed")


def _added_to_experts(block: nn.Module) -> list[str]:
    """The children of a block whose results are added to those of its experts."""
    if not any(has_experts(child) for child in block.children()):
        return []
    return [
        name
        for name, child in block.named_children()
        if isinstance(down := getattr(child, _DOWN, None), nn.Linear) and down.bias is None
    ]


def cut_experts(model: nn.Module, mesh: Any, parts: int) -> None:
    """Leave each process of `mesh` its part of the experts of a model that does not train.

    parts: "ep", among how many processes experts are spread; the others split each of them.  All
    processes have the same tokens; what their experts make of them is added up, together with
    what shared experts do, by one all-reduce.
    """
    rank, slices = mesh.get_local_rank(), mesh.size() // parts
    check_divides("ep", parts, mesh.size(), "processes of tp")
    for block in list(model.modules()):
        for experts in filter(has_experts, block.children()):
            _cut(experts, rank % parts, parts, rank // parts, slices)
            reduced = block if _added_to_experts(block) else experts
            _reduce_results(reduced, mesh.get_group())


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
        if name.startswith(_PACKED):
            dim = part.dim() - 1 if turned or part.dim() == 2 else 1
            halves = (part,) if turned else part.chunk(2, dim)
            part = torch.cat([half.chunk(slices, dim)[number] for half in halves], dim)
        elif name == _DOWN:
            part = part.chunk(slices, 1 if turned else 2)[number]
        elif number:  # a bias is added once
            part = torch.zeros_like(part)
        _put(experts, name, part)
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


def _reduce_results(module: Any, group: Any) -> None:
    """Add up the results of a module over a group: of several, the first."""
    forward = module.forward

    def reduced(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        first = result[0] if isinstance(result, tuple) else result
        torch.distributed.all_reduce(first, group=group)
        return result

    module.forward = reduced


# -- sequences -------------------------------------------------------------------------------------
# In training each process of "tp" has a part of the positions wherever nothing is cut (Korthikanti
# et al., arXiv:2205.05198, section 4.2): all-gather before a block, reduce-scatter after it.


_c10d: Any = torch.ops._c10d_functional


class _Exchanged(torch.autograd.Function):
    """A tensor as one function exchanges it; another exchanges its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Any, back: Any) -> torch.Tensor:
        ctx.back = back
        return there(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.back(grads[0]), None, None


class _Processes:
    """Exchanges among the processes of "tp"; sequences are [batch, positions, width]."""

    def __init__(self, mesh: Any) -> None:
        self.size: int = mesh.size()
        self.rank: int = mesh.get_local_rank()
        self.group = mesh.get_group().group_name

    def gather(self, part: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """All positions; the parts of all along another dimension."""
        rows = part.transpose(0, dim).contiguous()
        made = _c10d.all_gather_into_tensor(rows, self.size, self.group)
        return _c10d.wait_tensor(made).transpose(0, dim).contiguous()  # type: ignore[no-any-return]

    def scatter(self, whole: torch.Tensor) -> torch.Tensor:
        """Own positions of the sum over all processes."""
        rows = self._checked(whole).transpose(0, 1).contiguous()
        made = _c10d.reduce_scatter_tensor(rows, "sum", self.size, self.group)
        return _c10d.wait_tensor(made).transpose(0, 1).contiguous()  # type: ignore[no-any-return]

    def own(self, whole: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Own positions of what all have; an own part along another dimension."""
        checked = self._checked(whole) if dim == 1 else whole
        return checked.chunk(self.size, dim)[self.rank].contiguous()

    def add(self, x: torch.Tensor, how: str = "sum") -> torch.Tensor:
        """The sum, or the maximum, over all processes."""
        made = _c10d.all_reduce(x.contiguous(), how, self.group)
        return _c10d.wait_tensor(made)  # type: ignore[no-any-return]

    def _checked(self, whole: torch.Tensor) -> torch.Tensor:
        check_divides("tp", self.size, whole.shape[1], "positions")
        return whole


_CUT = {"colwise": -2, "rowwise": -1, "packed_colwise": -2, "packed_rowwise": -1}
"""The dimension that a style of transformers cuts; a vector has one."""
_ADDED = ("rowwise", "packed_rowwise")
"""Styles whose results all processes add up."""
_UNCUT = (
    "replicated_with_grad_allreduce", "mla_kv_a_proj", "moe_tp_experts", "local_params",
    "all_reduce", _WHOLE,
)  # fmt: skip
"""Styles of parts of a block that all processes have whole, or whose weights have styles."""


def why_sequences_stay(model: Any, styles: Mapping[str, str]) -> str:
    """The part of a model that `cut_sequences` cannot take, as a clause; "" where it can.

    styles: of modules and weights, by their paths.
    """
    if model.get_output_embeddings() is None:
        return "there is no head"
    names = {module: name for name, module in model.named_modules()}
    try:
        layers = layers_of(model)
    except RequestError:
        return "there is no list of layers"
    for layer in layers:
        for name, weight in layer.named_parameters():
            path, child = f"{names[layer]}.{name}", f"{names[layer]}.{name.partition('.')[0]}"
            if not _is_block(child, styles) and (weight.dim() > 1 or path == child):
                return f"{pattern_of(path)} is whole"
    for name, style in styles.items():
        if "." in name and pattern_of(name) != name and style not in (*_CUT, *_UNCUT):
            return f"{pattern_of(name)} is {style}"
    return ""


def _is_block(path: str, styles: Mapping[str, str]) -> bool:
    """Whether a child of a layer has parts that are cut."""
    return any(n.startswith(f"{path}.") and style in _CUT for n, style in styles.items())


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def cut_sequences(
    model: Any, mesh: Any, styles: Mapping[str, str], *, makes_loss: bool = True
) -> None:
    """Shard a model that trains, in place, with its sequences wherever nothing else is cut.

    Weights of its blocks are cut by these styles, the vocabulary by rows.  makes_loss: the model
    makes it, of the logits of own words; else logits are gathered.  What all processes have whole
    gets the sum of its gradients.
    """
    ranks, names = _Processes(mesh), {module: name for name, module in model.named_modules()}
    layers = [layer for layer in layers_of(model) if _has_weights(layer)]
    for layer in layers:
        for child in layer.children():
            if _is_block(names[child], styles):
                _cut_weights(child, names[child], styles, ranks)
                _around(child, ranks)
            else:
                _share(child, ranks)
    _cut_ends(model, layers[0], ranks)
    _cut_head(model, ranks, makes_loss)


def _cut_weights(block: nn.Module, path: str, styles: Mapping[str, str], ranks: _Processes) -> None:
    """Leave a process its part of the weights of a block."""
    for place, module in list(block.named_modules(prefix=path)):
        shared = dict[str, float]()
        for name, weight in list(module.named_parameters(recurse=False)):
            style = styles.get(f"{place}.{name}", "")
            if style in _CUT and not (weight.dim() == 1 and style in _ADDED):
                dim = max(_CUT[style], -weight.dim())
                check_divides("tp", ranks.size, weight.shape[dim], "channels")
                halves = weight.chunk(2, dim) if style.startswith("packed") else (weight,)
                parts = [half.chunk(ranks.size, dim)[ranks.rank] for half in halves]
                _put(module, name, torch.cat(parts, dim))
            else:  # a bias of sums is added once: a share of it by each process
                is_added = style in _ADDED or name == f"{_DOWN}_bias"
                shared[name] = 1 / ranks.size if is_added else 1.0
        _share_weights(module, shared, ranks)


def _share(part: nn.Module, ranks: _Processes) -> None:
    """Let the weights of a part get the sum of their gradients."""
    for module in part.modules():
        names = (name for name, _ in module.named_parameters(recurse=False))
        _share_weights(module, dict.fromkeys(names, 1.0), ranks)


def _share_weights(module: Any, scales: Mapping[str, float], ranks: _Processes) -> None:
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


def _with_first(change: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a call, of which the first one is changed."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


def _around(block: Any, ranks: _Processes) -> None:
    """Let a block take all positions, and add up its results for each process's own ones."""
    forward = block.forward
    enter, leave = _exchange(ranks.gather, ranks.scatter), _exchange(ranks.scatter, ranks.gather)

    def of_all(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _with_first(enter, args, kwargs)
        shape = (args[0] if args else kwargs["hidden_states"]).shape
        result = forward(*args, **kwargs)
        if isinstance(result, tuple):
            return leave(result[0].view(shape)), *result[1:]
        return leave(result.view(shape))

    block.forward = of_all


def _cut_ends(model: Any, first: nn.Module, ranks: _Processes) -> None:
    """Cut the embedding, and the hidden states that enter the first layer of a process."""
    base = base_of(model)
    parts = [part for part in base.children() if _has_weights(part)]
    place = next(n for n, part in enumerate(parts) if any(m is first for m in part.modules()))
    for part in parts[place + 1 :]:
        _share(part, ranks)
    embedding: Any = model.get_input_embeddings()
    if isinstance(embedding, nn.Embedding):
        _cut_words(embedding, ranks.rank, ranks.size)
    if not _has_weights(layers_of(model)[0]):
        change = _handed(model, ranks.size)
    elif place == 1 and any("Rotary" in type(child).__name__ for child in base.children()):
        # Positions are turned in attention, and nothing is added to what was looked up.
        change = _exchange(ranks.scatter, ranks.gather)
    else:
        looked_up, add = embedding.forward, _exchange(ranks.add, _same)
        embedding.forward = lambda ids: add(looked_up(ids))
        change = _exchange(ranks.own, ranks.gather)
    enter = partial(_with_first, change)
    first.register_forward_pre_hook(lambda _, args, kwargs: enter(args, kwargs), with_kwargs=True)


def _handed(model: Any, size: int) -> Any:
    """A function that gives the first layer of a stage the part that the stage before handed on.

    Until then the model sees a tensor of as many positions as all processes have.
    """
    parts = list[torch.Tensor]()

    def keep(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        parts.append(part := kwargs["inputs_embeds"])
        batch, positions, width = part.shape
        whole = part.new_empty(()).expand(batch, positions * size, width)
        return args, {**kwargs, "inputs_embeds": whole}

    model.register_forward_pre_hook(keep, with_kwargs=True)
    model.sequence_parts = size
    return lambda whole: parts.pop()


def _cut_head(model: Any, ranks: _Processes, makes_loss: bool) -> None:
    """Let each process have the logits of its own words, and of all positions."""
    head: Any = model.get_output_embeddings()
    if not hasattr(head, "out_features"):  # a stage before the last one
        return
    forward, words = head.forward, head.out_features
    for name, weight in list(head.named_parameters()):
        _put(head, name, _own_rows(weight, ranks.rank, ranks.size))
    start = ranks.rank * head.weight.shape[0]
    enter = _exchange(ranks.gather, ranks.scatter)
    leave = _exchange(partial(ranks.gather, dim=-1), partial(ranks.own, dim=-1))

    def of_own(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = forward(enter(hidden))
        return logits[..., : words - start] if makes_loss else leave(logits)[..., :words]

    head.forward = of_own
    if makes_loss:
        model.loss_function = partial(_loss, ranks, start)


def _loss(
    ranks: _Processes,
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
    def forward(ctx: Any, logits: torch.Tensor, words: torch.Tensor, ranks: _Processes) -> Any:
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
