"""Tensor and expert parallelism as inference engines and Megatron-LM do it.

transformers' plan of DeepSeek leaves attention whole on every process, that of gpt-oss all but the
head, that of Phi-3 gathers queries, keys and values, and the first two add up routed and shared
experts one by one.  Here the blocks of a model are found by their products: some read the hidden
states and are cut by columns, one writes them and is cut by rows (Shoeybi et al., arXiv:1909.08053,
section 3).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from rooftrace.errors import RequestError
from rooftrace.graph import pattern_of

_c10d: Any = torch.ops._c10d_functional
_COLUMNS = (
    "q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "fc1", "fc_in",
    "wi", "wi_0", "wi_1", "dense_h_to_4h", "w1", "w3", "c_fc", "q_lin", "k_lin", "v_lin", "lin1",
    "self.query", "self.key", "self.value", "intermediate.dense",
)  # fmt: skip
"""Names of products that read the hidden states, or the latents, of all heads or channels."""
_ROWS = (
    "o_proj", "out_proj", "down_proj", "fc2", "fc_out", "wo", "dense_4h_to_h", "w2", "c_proj",
    "dense", "out_lin", "lin2", "output.dense",
)  # fmt: skip
"""Names of products that write the hidden states."""
_QUERIES = (".q_proj", ".q_b_proj", ".query", ".q_lin")
_OF_HEADS = ("q_proj", "q_b_proj", "k_proj", "v_proj", "kv_b_proj")
_HEADS = (
    "num_attention_heads", "num_heads", "n_heads", "n_head", "num_key_value_heads", "num_kv_heads",
    "kv_heads",
)  # fmt: skip
_WIDTHS = ("embed_dim", "hidden_size", "split_size", "kv_dim")
"""Numbers of an attention: of its heads, or of the channels of all of them."""
_LATENT_KEYS = "kv_a_proj_with_mqa"
_PACKED, DOWN = "gate_up_proj", "down_proj"
"""Weights of all experts: [experts, 2 channels, hidden] and [experts, hidden, channels], or these
turned."""
WHOLE, CUT = "replicate", "local_params"
"""transformers' words for a part that every process has whole, and for one that is cut here."""


# -- exchanges -------------------------------------------------------------------------------------


class Peers:
    """Exchanges among the processes of a mesh; sequences are [batch, positions, width]."""

    def __init__(self, mesh: Any) -> None:
        self.size: int = mesh.size()
        self.rank: int = mesh.get_local_rank()
        self._group = mesh.get_group()

    def gather(self, part: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """All positions; the parts of all along another dimension."""
        rows = _first(part, dim).contiguous()
        made = _c10d.all_gather_into_tensor(rows, self.size, self._group.group_name)
        return _first(_c10d.wait_tensor(made), dim).contiguous()

    def scatter(self, whole: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Own positions of the sum over all processes."""
        rows = _first(self._checked(whole, dim), dim).contiguous()
        made = _c10d.reduce_scatter_tensor(rows, "sum", self.size, self._group.group_name)
        return _first(_c10d.wait_tensor(made), dim).contiguous()

    def own(self, whole: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Own positions of what all have; an own part along another dimension."""
        return self._checked(whole, dim).chunk(self.size, dim)[self.rank].contiguous()

    def add(self, x: torch.Tensor, how: str = "sum") -> torch.Tensor:
        """The sum, or the maximum, over all processes."""
        made = _c10d.all_reduce(x.contiguous(), how, self._group.group_name)
        return _c10d.wait_tensor(made)  # type: ignore[no-any-return]

    def sum_up(self, x: torch.Tensor) -> torch.Tensor:
        """The sum, in place: nothing is learnt."""
        torch.distributed.all_reduce(x, group=self._group)
        return x

    def _checked(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        if dim == 1 and whole.shape[1] % self.size:
            raise RequestError(
                f"--mesh tp={self.size}: {whole.shape[1]:,} positions cannot be spread evenly over "
                f"it; expected a multiple of {self.size}, or --plan transformers, which keeps "
                "sequences whole"
            )
        return whole


def _first(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.transpose(0, dim) if dim else x


def entered(enter: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a call, of which the first one is changed."""
    if args:
        return (enter(args[0]), *args[1:]), kwargs
    name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
    return args, {**kwargs, name: enter(kwargs[name])}


def around(module: Any, enter: Any = None, leave: Any = None) -> None:
    """Let a module take its first argument as one function makes it, and return its first result as
    another does."""
    forward = module.forward

    def changed(*args: Any, **kwargs: Any) -> Any:
        if enter is not None:
            args, kwargs = entered(enter, args, kwargs)
        result = forward(*args, **kwargs)
        if leave is None:
            return result
        if isinstance(result, tuple):
            return leave(result[0]), *result[1:]
        return leave(result)

    module.forward = changed


# -- rules -----------------------------------------------------------------------------------------


def as_engines(model: Any, size: int, *, trains: bool, cut: bool, gathers: bool) -> dict[str, str]:
    """Styles of transformers where an engine shards otherwise than its own plan, over `size`.

    Where keys and values have fewer heads than there are processes, each process gets one of them
    (not in training, where no engine does so): they are cut here, in place, as is one product of
    queries, keys and values.  cut: whether `cut_experts` follows; gathers: and cuts shared experts,
    too.  The keys are paths of modules and parameters, with * for the number of a layer.  Where
    transformers spreads no layer, code of attention may count heads: its numbers become those of a
    process.  Raises RequestError for heads that do not divide, and where nothing can be cut.
    """
    own: dict[str, str] = dict(model.tp_plan or {})
    rules, joined, counted = dict[str, str](), dict[str, str](), list[str]()
    ready = bool(model.ep_plan) or any("*" in name for name in own)
    _turn(model)
    vocabulary = None if trains else _vocabulary(model, size)
    for path, block in list(model.named_modules()):
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
        elif (fused := _fused(model, block)) and own.get(f"{place}.{fused[0]}") != "colwise":
            styles = _cut_fused(model, block, *fused, size, trains)
            counted.append(path)
        elif not any(f"{place}.{name}" in own for name in children):
            styles = dict(_rules_of(block, trains))
            if not ready and any(name in _OF_HEADS for name in styles):
                counted.append(path)
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
    by_heads = [name for name in own | rules if name.endswith(_QUERIES)]
    if by_heads:
        heads = model.config.get_text_config().num_attention_heads
        check_divides("tp", size, heads, "attention heads")
    _count_own(model, counted, size)
    if not own and not rules and size > 1:
        raise RequestError(
            f"--mesh tp={size}: {type(model).__name__} has no block that is known to be cut, and "
            "transformers has no plan for it; name a function build(mesh) in file.py:build that "
            "shards the module"
        )
    return rules | joined


def check_divides(axis: str, processes: int, number: int, what: str) -> None:
    """Raise RequestError where so many things cannot be spread evenly over an axis of a mesh."""
    if number % processes:
        fitting = [str(size) for size in range(2, number + 1) if not number % size]
        sizes = f"; sizes that divide them are {', '.join(fitting)}" if fitting else ""
        raise RequestError(
            f"--mesh {axis}={processes}: {number:,} {what} cannot be spread evenly over it{sizes} "
            "(copies are not modelled)"
        )


def _rules_of(block: nn.Module, trains: bool) -> Iterator[tuple[str, str]]:
    """Styles of the parts of a block, by their name; "" is the block."""
    linear = [name for name, part in block.named_modules() if isinstance(part, nn.Linear)]
    if not any(name in _ROWS for name in linear) or not any(name in _COLUMNS for name in linear):
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
        around(embedding, leave=Peers(mesh).sum_up)


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


def _turn(model: nn.Module) -> None:
    """Put a Linear in the place of each Conv1D of transformers, whose weight is [in, out], as vLLM
    has it (`load_weights` of its model_executor/models/gpt2.py)."""
    for block in list(model.modules()):
        for name, part in list(block.named_children()):
            if type(part).__name__ == "Conv1D" and hasattr(part, "nf"):
                loose: Any = part
                made = nn.Linear(loose.nx, loose.nf, device="meta")
                made.weight, made.bias = nn.Parameter(loose.weight.detach().t().clone()), loose.bias
                setattr(block, name, made)


def _fused(model: Any, block: nn.Module) -> tuple[str, int] | None:
    """The product of queries, keys and values of an attention, and its heads of keys."""
    heads = getattr(model.config.get_text_config(), "num_attention_heads", 0)
    width = getattr(block, "head_dim", None)
    if not heads or not isinstance(width, int) or any(hasattr(block, n) for n in _OF_HEADS):
        return None
    parts = {name: p for name, p in block.named_children() if isinstance(p, nn.Linear)}
    if all(parts[name].in_features != heads * width for name in parts.keys() & set(_ROWS)):
        return None
    for name in parts.keys() - set(_ROWS):
        keys, rest = divmod(parts[name].out_features - heads * width, 2 * width)
        if keys > 0 and not rest and not heads % keys:
            return name, keys
    return None


def _cut_fused(
    model: Any, block: Any, name: str, keys: int, size: int, trains: bool
) -> dict[str, str]:
    """Styles of an attention, of whose product of queries, keys and values a process keeps those
    of its heads.

    The rows are taken to be all queries, then keys, then values: in models that put them otherwise
    a process has as many.
    """
    heads = model.config.get_text_config().num_attention_heads
    check_divides("tp", size, heads, "attention heads")
    if trains or size % keys:
        check_divides("tp", size, keys, "heads of keys and values")
    layer = getattr(block, name)
    _keep_heads(layer, [heads, keys, keys], size)
    block.num_key_value_groups = heads // size // max(keys // size, 1)
    styles = {name: "packed_colwise", **{f"{name}.{w}": CUT for w, _ in layer.named_parameters()}}
    return styles | {row: "rowwise" for row, _ in block.named_children() if row in _ROWS}


def _keep_heads(layer: Any, parts: list[int], size: int) -> None:
    """Leave a process its share of each of these numbers of heads, or one that others have too."""
    width, rank = layer.out_features // sum(parts), torch.distributed.get_rank() % size
    for name, weight in list(layer.named_parameters()):
        kept = [
            part[rank * n // size * width :][: max(n // size, 1) * width]
            for part, n in zip(weight.split([n * width for n in parts]), parts, strict=True)
        ]
        put_part(layer, name, torch.cat(kept))
    layer.out_features = layer.weight.shape[0]


def _cut_heads(model: Any, attention: Any, size: int) -> list[str]:
    """The products of keys and values that were cut to one head, which several processes share."""
    config = model.config.get_text_config()
    heads, queries = getattr(config, "num_key_value_heads", None), config.num_attention_heads
    if heads is None or not heads % size or size % heads or queries % size:
        return []
    cut = [name for name in ("k_proj", "v_proj") if isinstance(getattr(attention, name), nn.Linear)]
    for name in cut:
        _keep_heads(getattr(attention, name), [heads], size)
    attention.num_key_value_groups = queries // size
    return cut


def _count_own(model: Any, paths: Collection[str], size: int) -> None:
    """Let these attentions, and the modules around them, count the heads of one process."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", 0)
    around = {path[:end] for path in paths for end in range(len(path)) if path[end] == "."} | {""}
    for part in (model.get_submodule(path) for path in around if paths):
        for name in _HEADS:  # of ALiBi
            if getattr(part, name, None) == heads:
                setattr(part, name, heads // size)
    for block in map(model.get_submodule, paths):
        model.counted_heads = heads // size
        block.config = copy.copy(getattr(block, "config", config))
        for part in (block, block.config):
            own = dict.fromkeys(_HEADS, 1)
            if part is block:
                own |= dict.fromkeys(_WIDTHS, block.head_dim)
            for name, least in own.items():
                if isinstance(number := getattr(part, name, None), int):
                    setattr(part, name, max(number // size, least))


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
                ranks = Peers(replicas)
                around(block, partial(ranks.gather, dim=0), partial(ranks.scatter, dim=0))
            if tp.size() > 1:
                around(block if shared or number > 1 else experts, leave=Peers(tp).sum_up)


def _cut_shared(block: Any, rank: int, processes: int) -> None:
    """Keep one of so many equal parts of the channels of a shared expert."""
    check_divides("tp", processes, block.down_proj.in_features, "channels of a shared expert")
    for name, layer in block.named_children():
        if isinstance(layer, nn.Linear):
            dim = 1 if name == DOWN else 0
            put_part(layer, "weight", layer.weight.chunk(processes, dim)[rank])
            layer.out_features, layer.in_features = layer.weight.shape


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
