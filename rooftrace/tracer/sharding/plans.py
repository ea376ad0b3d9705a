"""Tensor and expert parallelism as inference engines and Megatron-LM do it.

transformers' plan of DeepSeek leaves attention whole on every process, that of gpt-oss all but the
head, and both add up routed and shared experts one by one.  Here the blocks of a model are found by
their products: some read the hidden states and are cut by columns, one writes them and is cut by
rows (Shoeybi et al., arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from rooftrace.errors import RequestError
from rooftrace.graph import pattern_of

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
_PACKED, DOWN = "gate_up_proj", "down_proj"
"""Weights of all experts: [experts, 2 channels, hidden] and [experts, hidden, channels], or these
turned."""
WHOLE = "replicate"
"""transformers' word for a part that every process has whole."""


# -- rules -----------------------------------------------------------------------------------------


def as_engines(model: Any, size: int, *, trains: bool, cut: bool, gathers: bool) -> dict[str, str]:
    """Styles of transformers where an engine shards otherwise than its own plan, over `size`.

    Where keys and values have fewer heads than there are processes, each process gets one of them
    (not in training, where no engine does so): they are cut here, in place.  cut: whether
    `cut_experts` follows; gathers: and cuts shared experts, too.  The keys are paths of modules and
    parameters, with * for the number of a layer.  Attention is cut in models of which transformers
    spreads a layer: code of others may count on all heads.  Raises RequestError for heads that do
    not divide.
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
                styles = dict.fromkeys(("", *block.state_dict()), WHOLE)
            elif place not in own:
                styles = dict(_rules_of_experts(block))
        elif _is_fused(block):
            styles = {_PACKED: "packed_colwise", DOWN: "rowwise"}
        elif not any(f"{place}.{name}" in own for name in children):
            styles = dict(_rules_of(block, children, trains, ready))
        if "k_proj" in children and (f"{place}.k_proj" in own or "k_proj" in styles) and not trains:
            styles |= dict.fromkeys(_cut_heads(model, block, size), WHOLE)
        for shared in _added_to_experts(block) if cut else ():
            if gathers:
                names = [f"{place}.{shared}.{name}" for name in getattr(block, shared).state_dict()]
                names += [name.rpartition(".")[0] for name in names]
                joined |= dict.fromkeys(names, WHOLE)  # they are cut with the experts
                continue
            down = f"{place}.{shared}.{DOWN}"  # whose results are added up with those of experts
            joined |= {down: "local_params", f"{down}.weight": "rowwise"}
        if block is vocabulary:
            styles = dict.fromkeys(("", "weight"), WHOLE)
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
    parts = [part for name, part in block.named_children() if name in (_PACKED, DOWN)]
    sizes = [(p.in_features, p.out_features) for p in parts if isinstance(p, nn.Linear)]
    return len(sizes) == 2 and sizes[0] == (sizes[1][1], 2 * sizes[1][0])


def _rules_of_experts(experts: nn.Module) -> Iterator[tuple[str, str]]:
    turned = experts.is_transposed
    yield _PACKED, "rowwise" if turned else "packed_colwise"
    yield DOWN, "colwise" if turned else "rowwise"
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
        cut_words(embedding, mesh.get_local_rank(), mesh.size())
        _reduce_results(embedding, mesh.get_group())


def cut_words(embedding: Any, rank: int, size: int) -> None:
    """Let an embedding look up its own words, and take zeros for all others."""
    forward = embedding.forward
    put_part(embedding, "weight", own_rows(embedding.weight, rank, size))
    count, padding = len(embedding.weight), embedding.padding_idx
    start = rank * count

    def of_own(tokens: torch.Tensor) -> torch.Tensor:
        others = (tokens < start) | (tokens >= start + count)
        rows: torch.Tensor = forward((tokens - start).masked_fill(others, 0))
        return rows.masked_fill(others.unsqueeze(-1), 0.0)

    is_own = padding is not None and start <= padding < start + count
    embedding.forward, embedding.padding_idx = of_own, padding - start if is_own else None


def own_rows(weight: torch.Tensor, rank: int, size: int) -> torch.Tensor:
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
            put_part(layer, kind, weight[start : start + width])
    attention.num_key_value_groups = queries // size
    return cut


def put_part(module: nn.Module, name: str, part: torch.Tensor) -> None:
    """Put a part of a weight in its place."""
    gradient = module.get_parameter(name).requires_grad
    setattr(module, name, nn.Parameter(part.detach().clone(), requires_grad=gradient))


# -- experts ---------------------------------------------------------------------------------------


def has_experts(module: nn.Module) -> bool:
    """Whether a module has the weights of many experts, and takes tokens with their choices."""
    weights = (getattr(module, name, None) for name in (_PACKED, DOWN))
    packed = all(isinstance(w, nn.Parameter) and w.dim() == 3 for w in weights)
    return packed and hasattr(module, "is_transposed")


def _added_to_experts(block: nn.Module) -> list[str]:
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
            shared = _added_to_experts(block)
            if number > 1:
                for name in shared:
                    _cut_shared(getattr(block, name), rank, number * tp.size())
                _gather_tokens(block, replicas)
            if tp.size() > 1:
                _reduce_results(block if shared or number > 1 else experts, tp.get_group())


def _cut_shared(block: Any, rank: int, processes: int) -> None:
    """Keep one of so many equal parts of the channels of a shared expert."""
    check_divides("tp", processes, block.down_proj.in_features, "channels of a shared expert")
    for name, layer in block.named_children():
        if isinstance(layer, nn.Linear):
            dim = 1 if name == DOWN else 0
            put_part(layer, "weight", layer.weight.chunk(processes, dim)[rank])
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
        if name.startswith(_PACKED):
            dim = part.dim() - 1 if turned or part.dim() == 2 else 1
            halves = (part,) if turned else part.chunk(2, dim)
            part = torch.cat([half.chunk(slices, dim)[number] for half in halves], dim)
        elif name == DOWN:
            part = part.chunk(slices, 1 if turned else 2)[number]
        elif number:  # a bias is added once
            part = torch.zeros_like(part)
        put_part(experts, name, part)
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
