"""Arguments of a call on meta: those of a user, of another batch size, or described in text."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from rooftrace.errors import RequestError
from rooftrace.tracer.asking import RequestLengths
from rooftrace.tracer.inputs.arguments import MOST_DRAWN, cache_arguments, drawn, sized
from rooftrace.tracer.tensors import own_tensors, parameters_of, tensors_in
from rooftrace.tracer.twins import inputs_on_meta, replaced, twin
from rooftrace.tracer.values import META, REAL_VALUE, marks

_PROMPTS = ("decoder_input_ids", "input_ids")
"""Names of arguments that hold token ids.  A decode step continues the first of them that the call
has, else the first argument if that looks like token ids."""
Assumptions = tuple[tuple[str, str], ...]
"""Kind and text of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Arguments of one call of a module, and of the calls that belong to other phases."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, Any] = field(default_factory=dict)  # more, of a training call
    labels_likely: bool = False  # they need no search, unless the module refuses them
    # Searches labels that a module takes, and says what is assumed of them.
    find_labels: Callable[[nn.Module], tuple[Mapping[str, Any], Assumptions]] | None = None
    # Of a step that continues from a cache, without the cache; None: the module has no such step.
    decode: Mapping[str, Any] | None = None
    cached: Mapping[str, Any] = field(default_factory=dict)  # more, of calls that return a cache
    cached_kwargs: Mapping[str, Any] | None = None  # a prompt of the cached length, if another
    items: int | None = None  # how many a step produces; None: the batch
    item: str = "sample"  # what it produces
    workload: Mapping[str, Any] = field(default_factory=dict)  # sizes, for the report
    assumptions: Assumptions = ()
    lengths: RequestLengths | None = None  # of the requests of a step that has them

    def trained(self, module: nn.Module, likely: bool = True) -> Inputs:
        """The inputs of a training call with labels: likely ones if there are, else by a search.

        Raises RequestError where none are found.
        """
        if self.find_labels is None or (likely and self.labels_likely):
            return self
        labels, assumed = self.find_labels(module)
        return replace(
            self,
            labels={**self.labels, **labels},
            labels_likely=False,
            find_labels=None,
            assumptions=(*self.assumptions, *assumed),
        )

    def prompt_of(self, length: int) -> dict[str, Any]:
        """The call with a prompt of so many tokens, which the prompt of the cache has at least."""
        prompt = self.kwargs if self.cached_kwargs is None else self.cached_kwargs
        names = self.decode or {}
        return {n: first_tokens(t, length) if n in names else t for n, t in prompt.items()}

    def filled(self, fill: Callable[[Tensor], Tensor]) -> Inputs:
        """The inputs with what `fill` makes in place of each tensor."""
        names = ("args", "kwargs", "labels", "decode", "cached", "cached_kwargs")
        return replace(self, **{name: replaced(getattr(self, name), fill) for name in names})


@dataclass(frozen=True, slots=True)
class Loaded:
    """A module on meta with inputs for it, and what it is called."""

    module: nn.Module
    inputs: Inputs
    name: str = ""

    def filled(self, fill: Callable[[Tensor], Tensor]) -> Loaded:
        """A copy of the module, and its inputs, with what `fill` makes in place of each tensor.

        A parameter stays one, and tied weights stay tied.
        """
        memo: dict[int, Any] = {}
        for tensor in (tensor for part in self.module.modules() for tensor in own_tensors(part)):
            if id(tensor) not in memo:
                made = fill(tensor)
                if isinstance(tensor, nn.Parameter):
                    made = nn.Parameter(made, tensor.requires_grad)
                memo[id(tensor)] = made
        return Loaded(copy.deepcopy(self.module, memo), self.inputs.filled(fill), self.name)


def call_inputs(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    batch: int | None = None,
) -> Inputs:
    """`Inputs` of a plain call; for decode the arguments are the prompt, and its last token the
    step's own input.

    batch: another batch size than that of the arguments.  Raises RequestError where no argument has
    a first dimension to change.
    """
    moved: tuple[tuple[Any, ...], dict[str, Any]] = inputs_on_meta((tuple(args), dict(kwargs)))
    args, kwargs = moved if batch is None else _with_batch(moved, batch)
    tensors = tensors_in((args, kwargs))
    batch = int(tensors[0].shape[0]) if tensors and tensors[0].dim() else 1
    names = [n for n, p in parameters_of(module).items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    key = _prompt(named, tensors)
    if key is None:
        return Inputs(args=tuple(args), kwargs=kwargs, workload={"batch": batch})
    tokens: Tensor = named[key]
    length = int(tokens.shape[1])
    workload = {"batch": batch, "seq": length}
    decode = None
    if cache_arguments(module):
        workload["kv"] = length
        decode = {key: last_token(tokens)}
    return Inputs(
        args=tuple(args),
        kwargs=kwargs,
        decode=decode,
        cached=_cache_switch(module),
        items=tokens.numel(),
        item="token",
        workload=workload,
    )


def _prompt(named: Mapping[str, Any], tensors: list[Tensor]) -> str | None:
    """The name of the argument that holds the prompt, among _PROMPTS or the first; else None."""
    first = [name for name, item in named.items() if tensors and item is tensors[0]]
    return next((name for name in (*_PROMPTS, *first) if is_tokens(named.get(name))), None)


def _cache_switch(module: nn.Module) -> dict[str, Any]:
    """The keyword argument that makes a module return its cache; empty if it has none."""
    named = "use_cache" in parameters_of(module)
    return {"use_cache": True} if named or hasattr(module, "can_generate") else {}


def is_tokens(item: Any) -> bool:
    """Whether an argument looks like token ids: whole numbers, [batch, sequence]."""
    return isinstance(item, Tensor) and item.dim() == 2 and not item.dtype.is_floating_point


def last_token(tokens: Tensor) -> Tensor:
    """The last column of token ids, with its value where that is known."""
    return _columns(tokens, tokens.shape[1] - 1, 1)


def first_tokens(tokens: Tensor, count: int) -> Tensor:
    """The first columns of token ids, with their values where those are known."""
    return _columns(tokens, 0, count)


def _columns(tokens: Tensor, start: int, count: int) -> Tensor:
    """Some columns; of draws that are too many to be known, draws of their own."""
    shape = tokens.shape[0], count
    value, classes = (tokens.__dict__.get(mark) for mark in (REAL_VALUE, marks.UNIFORM))
    if value is None and classes is not None:
        part = drawn(shape, tokens.dtype, classes.start, classes.stop)
    else:
        part = torch.empty(shape, dtype=tokens.dtype, device=META)
    if value is not None:
        part.__dict__[REAL_VALUE] = value[:, start : start + count].clone()
    if classes is not None:
        part.__dict__[marks.UNIFORM] = classes
    return part


def random_tokens(shape: tuple[int, ...], vocabulary: int) -> Tensor:
    """Known token ids, drawn uniformly with a fixed seed, without the first few (special) ones.

    They are not known where there are more than MOST_DRAWN.  Raises RequestError for more than
    torch can count.
    """
    first = min(5, vocabulary - 1)
    tokens = drawn(shape, torch.int64, first, vocabulary)
    tokens.__dict__[marks.UNIFORM] = range(first, vocabulary)
    return tokens


def _with_batch(tree: Any, batch: int) -> Any:
    """Inputs with another batch size, for all tensors with the first tensor's first dimension.

    Known values are repeated.  Raises RequestError where no input has a first dimension.
    """
    tensors = [t for t in tensors_in(tree) if t.dim()]
    if not tensors:
        raise RequestError(f"--batch {batch}: no input is a tensor with a first dimension")
    old = int(tensors[0].shape[0])

    def resized(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != old:
            return twin(tensor)
        value = tensor.__dict__.get(REAL_VALUE)
        made = sized((batch, *tensor.shape[1:]), tensor.dtype)
        if value is not None and old and made.numel() <= MOST_DRAWN:
            return twin(value[torch.arange(batch) % old])
        return made

    return replaced(tree, resized)


def check_names(module: nn.Module, texts: Mapping[str, Any]) -> None:
    """Raise RequestError for an input that the module's forward does not take."""
    parameters = parameters_of(module)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name in texts:
        if name not in parameters:
            raise RequestError(
                f"--input {name}: {type(module).__name__}.forward takes "
                f"{', '.join(parameters) or 'no arguments'}"
            )
