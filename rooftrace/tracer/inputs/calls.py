"""Arguments of a traced call on meta, and restoration of the objects that the call changes."""

from __future__ import annotations

import contextlib
import copy
import math
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import is_
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from rooftrace.errors import RequestError
from rooftrace.graph import GraphError
from rooftrace.tracer import RequestLengths, torch_private
from rooftrace.tracer.recording import overrides
from rooftrace.tracer.values import (
    META,
    REAL_VALUE,
    Values,
    inputs_on_meta,
    masks,
    parameters_of,
    tensors_in,
    torch_dtype,
    trees,
    twin,
    with_tensors,
)

# -- restoring -------------------------------------------------------------------------------------
# Puts back whatever a traced call changes in the user's objects.
#
# A module whose tensors are all on meta is traced itself, not a copy, and with its hooks.
# After the trace, attributes of its modules and of the objects that they and the hooks hold are
# restored.

_CONTAINERS = (dict, OrderedDict, defaultdict, set, list, deque)
_NOTHING: dict[Any, Any] = {}
_DEPTH = 6
"""How deep objects inside objects are looked into."""
_NOT_THEIRS = (Tensor, nn.Module, type, ModuleType, bytes, *trees.PLAIN)


@contextlib.contextmanager
def as_before(module: nn.Module, inputs: Any = None) -> Iterator[None]:
    """Restore attributes (training flags, caches of tables) and gradients at the end of the block.

    Objects and containers that modules and their hooks hold are restored too.  inputs: of a module
    that runs on real tensors, and not on meta: then their content is restored as well, and that
    of the inputs, and the random numbers of the process.  Else only a tensor's identity is.
    """
    with contextlib.nullcontext() if inputs is None else _numbers_kept(module, inputs):
        state, parts = _State(), trees.modules_in(module)
        for part in parts:
            state.keep(part)
        # The mode of most is among their attributes, and is put back with these.
        others = (part for part in parts if "training" not in vars(part))
        modes = [(part, part.training) for part in others if hasattr(part, "training")]
        gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
        try:
            yield
        finally:
            for part, training in modes:
                part.training = training
            state.restore()
            for parameter, gradient in gradients:
                parameter.grad = gradient


@contextlib.contextmanager
def _numbers_kept(module: nn.Module, inputs: Any) -> Iterator[None]:
    """Restore the contents of tensors of a module and its inputs: content, gradient, attributes.

    Inside none of them has a gradient.  Their content is kept on the host.
    """
    held = trees.tensors_of(module)
    held += [t for part in module.modules() for _, t in trees.held_tensors(part)]
    tensors = list({id(t): t for t in (*held, *trees.tensors_in(inputs))}.values())
    pieces = [piece for tensor in tensors for piece in _pieces(tensor)]
    kept = [(piece, piece.to("cpu", copy=True)) for piece in pieces]
    leaves = [(t, t.grad) for t in tensors if t.is_leaf]
    marks = [(t, dict(t.__dict__)) for t in tensors]
    counted = tuple(t for t in tensors if type(t) in trees.ORDINARY and not t.is_inference())
    preserved = torch_private.unsafe_preserve_version_counter(counted)  # as the content is
    with preserved, overrides.draws_undone(devices=True):
        for leaf, _ in leaves:
            leaf.grad = None
        try:
            yield
        finally:
            with torch.inference_mode():  # in which such tensors of others may be written too
                for piece, content in kept:
                    piece.copy_(content)
            for leaf, gradient in leaves:
                leaf.grad = gradient
            for tensor, attributes in marks:
                _put_back(tensor.__dict__, attributes)


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """The real tensors that hold the content of one, each element once.

    Code that writes to them is not seen by autograd.
    """
    if isinstance(tensor, trees.LAZY):
        return
    for part, _ in trees.parts_of(tensor):
        for piece in trees.pieces_of(part):
            if not piece.is_meta:
                once = piece.data
                for axis, stride in enumerate(piece.stride()):
                    once = once if stride else once.narrow(axis, 0, min(1, once.shape[axis]))
                yield once


class _State:
    """The state of objects: attributes, items of containers, variables of functions."""

    def __init__(self) -> None:
        self._depths: dict[int, int] = {}
        self._held: list[Any] = []  # identities stay those of these objects
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._cells: list[tuple[CellType, Any]] = []

    def keep(self, part: nn.Module) -> None:
        """Remember a module's attributes, and their contents."""
        self._attributes.append((vars(part), dict(vars(part))))
        for item in vars(part).values():
            if type(item) in _CONTAINERS and not item:  # as most dicts of hooks
                self._containers.append((item, _NOTHING))
            elif type(item) not in trees.PLAIN:
                self._look(item, _DEPTH)

    def restore(self) -> None:
        """Put back the former attributes."""
        for container, content in chain(self._attributes, self._containers):
            if container or content:
                _put_back(container, content)
        for cell, value in self._cells:
            if trees.cell_content(cell) is not value and value is not trees.ABSENT:
                cell.cell_contents = value

    def _look(self, item: Any, depth: int) -> None:
        if isinstance(item, _NOT_THEIRS) or self._depths.get(id(item), 0) >= depth:
            return
        new = id(item) not in self._depths
        self._depths[id(item)] = depth
        self._held.append(item)
        if type(item) in _CONTAINERS:
            if new:
                self._containers.append((item, type(item).copy(item)))
            inside = list(item.values() if isinstance(item, dict) else item)
        elif isinstance(item, (tuple, frozenset)):
            inside = list(item)
        else:
            inside = self._of_object(item, new)
        for part in inside:
            self._look(part, depth - 1)

    def _of_object(self, item: Any, new: bool) -> list[Any]:
        if isinstance(item, MethodType):
            return [item.__self__, item.__func__]
        if isinstance(item, partial):
            return [item.func, *item.args, *item.keywords.values()]
        if isinstance(item, FunctionType):
            cells = item.__closure__ or ()
            if new:
                self._cells += [(cell, trees.cell_content(cell)) for cell in cells]
            return [*map(trees.cell_content, cells), *(item.__defaults__ or ())]
        if not _of_the_user(type(item)) or not isinstance(getattr(item, "__dict__", None), dict):
            return []
        if new:
            self._attributes.append((vars(item), dict(vars(item))))
        return list(vars(item).values())


def _of_the_user(kind: type) -> bool:
    """Whether a class is neither torch's nor Python's, whose objects other threads may use."""
    top = kind.__module__.partition(".")[0]
    return top not in ("torch", "rooftrace") and top not in sys.stdlib_module_names


def _put_back(container: Any, content: Any) -> None:
    """Give a container its old items back, if it has others now."""
    if _same(container, content):
        return
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(content)
    else:
        container.update(content)


def _same(container: Any, content: Any) -> bool:
    """Whether a container has the very items that it had."""
    if len(container) != len(content):
        return False
    if isinstance(container, set):
        return {*map(id, container)} == {*map(id, content)}
    alike = all(map(is_, container, content))
    if alike and isinstance(container, dict):
        return all(map(is_, container.values(), content.values()))
    return alike


# -- arguments -------------------------------------------------------------------------------------


def cache_arguments(module: nn.Module) -> set[str]:
    """Names of the arguments by which a module could take a cache.

    Only a run shows whether it does: an output with such a name is passed to the next call.
    """
    parameters = parameters_of(module).values()
    return {parameter.name for parameter in parameters if parameter.default is None}


def named_inputs(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors among the arguments of a call, by the names that a graph has for them."""
    names = [
        n
        for n, p in parameters_of(module).items()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    labels = [*names[: len(args)], *(f"input_{i}" for i in range(len(names), len(args)))]
    for label, item in (*zip(labels, args, strict=True), *kwargs.items()):
        tensors = tensors_in(item)
        for index, tensor in enumerate(tensors):
            yield (label if len(tensors) == 1 else f"{label}_{index}"), tensor


def floating_input(model: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """A meta tensor of this shape in the precision of the model's first floating parameter."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return torch.empty(shape, dtype=dtype, device="meta")


def typed_input(shape: tuple[int, ...], dtype: Any) -> Tensor:
    """A meta tensor of this shape.  dtype: torch's, or a name, ours or torch's ("bf16", "int64").

    Raises RequestError for a dtype that there is not.
    """
    if not isinstance(dtype, (torch.dtype, str)):
        raise RequestError(f"dtypes: expected torch.float16 or 'fp16' and the like, got {dtype!r}")
    try:
        kind = dtype if isinstance(dtype, torch.dtype) else torch_dtype(dtype)
    except GraphError as error:
        raise RequestError(f"dtypes: {error}") from None
    return torch.empty(shape, dtype=kind, device="meta")


def learn(values: Values, tensor: Tensor) -> None:
    """Give the value of a tensor to a recorder."""
    value = tensor.__dict__.get(REAL_VALUE)
    if value is not None:
        values.learn(tensor, value.clone())
    elif (mask := masks.mask_of(tensor)) is not None:
        values.learn(tensor, mask)
    if masks.UNIFORM in tensor.__dict__:
        values.uniform.learn_classes(tensor, tensor.__dict__[masks.UNIFORM])


# -- inputs of a shape -----------------------------------------------------------------------------

_MOST_BYTES = (1 << 63) - 1
"""Bytes of a tensor that torch can count."""

MOST_DRAWN = 1 << 25
"""Integers of an input that are drawn (256 MiB).  A larger one has sizes only."""

_SEED = 0


def drawn(shape: tuple[int, ...], dtype: torch.dtype, first: int, end: int) -> Tensor:
    """Whole numbers from `first` to below `end`, by a fixed seed."""
    unknown = sized(shape, dtype)
    if math.prod(shape) > MOST_DRAWN:
        return unknown
    generator = torch.Generator().manual_seed(_SEED)
    return twin(torch.randint(first, end, shape, generator=generator).to(dtype))


def sized(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A meta tensor.  Raises RequestError where torch cannot count its bytes."""
    size = math.prod(max(n, 1) for n in shape) * dtype.itemsize
    if size > _MOST_BYTES:
        raise RequestError(
            f"an input of {' x '.join(map(str, shape))} numbers has {float(size):.3g} bytes; torch "
            f"counts up to {_MOST_BYTES:.3g}: ask for smaller sizes"
        )
    return torch.empty(shape, dtype=dtype, device=META)


def parsed_inputs(texts: Mapping[str, str]) -> dict[str, Tensor]:
    """Meta tensors for "8,3,224,224:fp32"; integers are zeros and ones.  Raises RequestError."""
    return {name: _parsed(name, text) for name, text in texts.items()}


def _parsed(name: str, text: str) -> Tensor:
    shape_text, _, dtype_text = text.partition(":")
    try:
        shape = tuple(int(n) for n in shape_text.replace("x", ",").split(",") if n.strip())
        if any(not 0 <= n <= _MOST_BYTES for n in shape):
            raise ValueError(shape)
    except ValueError:
        raise RequestError(
            f"--input {name}={text:.60}: expected SHAPE:DTYPE, for example {name}=8,3,224,224:fp32"
        ) from None
    try:
        dtype = torch_dtype(dtype_text or "fp32")
    except GraphError as error:
        raise RequestError(f"--input {name}={text}: {error}") from None
    return made_input(shape, dtype)


def made_input(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A meta tensor of a shape; integers are zeros and ones."""
    if dtype.is_floating_point or dtype.is_complex:
        return sized(shape, dtype)
    return drawn(shape, dtype, 0, 2)


# -- calls -----------------------------------------------------------------------------------------

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
    # Searches labels that a module takes, with assumptions on them.
    find_labels: Callable[[nn.Module], tuple[Mapping[str, Any], Assumptions]] | None = None
    # Of a step that continues from a cache, without the cache; None: the module has no such step.
    decode: Mapping[str, Any] | None = None
    cached: Mapping[str, Any] = field(default_factory=dict)  # more, of calls that return a cache
    cached_kwargs: Mapping[str, Any] | None = None  # a prompt of the cached length, if another
    items: int | None = None  # how many a step produces; None: the batch
    item: str = "sample"  # its unit of output
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

    def shared(self, module: Any, count: int) -> Inputs:
        """The inputs of one of `count` processes that share each sequence (context parallelism).

        Raises RequestError for a module whose attention torch's does not take the place of, or that
        takes more than one sequence, and for a length without two chunks for each process.
        """
        kind, flag = type(module).__name__, f"--mesh cp={count}"
        length: Any = self.workload.get("seq")
        tensors = {n: t for n, t in {**self.kwargs, **self.labels}.items() if isinstance(t, Tensor)}
        others = tensors.keys() - {"input_ids", "inputs_embeds", "labels"}
        if others or not all(t.dim() > 1 and t.shape[1] == length for t in tensors.values()):
            raise RequestError(
                f"{flag}: {kind} takes {', '.join(tensors)}; sequences are shared of models that "
                "take input_ids [batch, sequence] alone"
            )
        by_torch = module.config._attn_implementation == "sdpa"
        by_torch = by_torch and module._can_set_attn_implementation()
        if not by_torch or not getattr(module, "supports_context_parallel", True):
            raise RequestError(
                f"{flag}: attention of {kind} has windows, sinks, positions or code of its own, "
                "which torch's context parallelism does not take; leave cp out"
            )
        if length % (2 * count):
            raise RequestError(
                f"{flag}: --seq {length}: each process has two chunks of a sequence, one from its "
                f"front and its mirror image; expected a multiple of {2 * count}"
            )

        def part(tensor: Tensor) -> Tensor:
            if tensor.dim() == 2:
                return first_tokens(tensor, length // count)
            size = tensor.shape[0], length // count, *tensor.shape[2:]
            return tensor.new_empty(size, requires_grad=tensor.requires_grad)

        pieces = {name: with_tensors(getattr(self, name), part) for name in ("kwargs", "labels")}
        text = (
            f"context parallelism as torch's: {count} processes share each sequence; keys and "
            "values of all are gathered, their gradients go around a ring"
        )
        assumptions = (*self.assumptions, ("plan", text))
        return replace(self, find_labels=None, assumptions=assumptions, **pieces)

    def filled(self, fill: Callable[[Tensor], Tensor]) -> Inputs:
        """The inputs with the result of `fill` in place of each tensor."""
        names = ("args", "kwargs", "labels", "decode", "cached", "cached_kwargs")
        return replace(self, **{name: with_tensors(getattr(self, name), fill) for name in names})


@dataclass(frozen=True, slots=True)
class Loaded:
    """A module on meta with inputs for it, and its name."""

    module: nn.Module
    inputs: Inputs
    name: str = ""

    def filled(self, fill: Callable[[Tensor], Tensor]) -> Loaded:
        """A copy of the module, and its inputs, with the result of `fill` in place of each tensor.

        A parameter stays one, and tied weights stay tied.
        """
        memo: dict[int, Any] = {}
        for tensor in trees.tensors_of(self.module):
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
    step's input.

    batch: another batch size than that of the arguments.  Raises RequestError where no argument has
    a first dimension to change, and for bags of indices in one row.
    """
    moved: tuple[tuple[Any, ...], dict[str, Any]] = inputs_on_meta((tuple(args), dict(kwargs)))
    bags = _bags(module, tensors_in(moved))
    if bags is not None:
        if batch not in (None, bags):
            raise RequestError(
                f"--batch {batch}: the first input has the indices of {bags:,} bags in one row, "
                "with offsets; give inputs of another size instead"
            )
        return Inputs(args=moved[0], kwargs=moved[1], items=bags, workload={"batch": bags})
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
        workload=workload,
        **counted(tokens, tensors, writes=decode is not None or key == _PROMPTS[0]),
    )


def counted(tokens: Tensor, inputs: Iterable[Tensor], writes: bool) -> dict[str, Any]:
    """The fields of `Inputs` that say what a step is counted in: tokens; or samples, where a call
    writes no tokens and reads a second text or images.

    Inputs for each sample that have the tokens' length, or are bool, belong to the tokens.
    """
    batch, length = tokens.shape[0], tokens.shape[-1]
    samples = (t for t in inputs if t.dim() > 1 and t.shape[0] == batch and t.dtype != torch.bool)
    others = (t for t in samples if length not in t.shape[1:] and t.numel() > batch)
    if not writes and list(others):
        return {}
    return {"items": tokens.numel(), "item": "token"}


def _bags(module: nn.Module, tensors: Sequence[Tensor]) -> int | None:
    """How many bags a module with an EmbeddingBag takes as one row of indices, and then offsets;
    None where it takes no such."""
    rows = [t for t in tensors if t.dim() == 1 and not t.dtype.is_floating_point]
    if len(rows) < 2 or rows[0] is not tensors[0]:
        return None
    parts = [part for part in module.modules() if isinstance(part, nn.EmbeddingBag)]
    return len(rows[1]) - parts[0].include_last_offset if parts else None


def _prompt(named: Mapping[str, Any], tensors: list[Tensor]) -> str | None:
    """The name of the argument that holds the prompt, among _PROMPTS or the first; else None."""
    first = [name for name, item in named.items() if tensors and item is tensors[0]]
    return next((name for name in (*_PROMPTS, *first) if is_tokens(named.get(name))), None)


def _cache_switch(module: nn.Module) -> dict[str, Any]:
    """The keyword argument that makes a module return its cache; empty if it has none."""
    named = "use_cache" in parameters_of(module)
    return {"use_cache": True} if named or hasattr(module, "can_generate") else {}


def is_tokens(item: Any) -> bool:
    """Whether an argument looks like token ids: integers, [batch, sequence]."""
    return isinstance(item, Tensor) and item.dim() == 2 and not item.dtype.is_floating_point


def last_token(tokens: Tensor) -> Tensor:
    """The last column of token ids, with its value if it has one."""
    return _columns(tokens, tokens.shape[1] - 1, 1)


def first_tokens(tokens: Tensor, count: int) -> Tensor:
    """The first columns of token ids, with their values if they have any."""
    return _columns(tokens, 0, count)


def _columns(tokens: Tensor, start: int, count: int) -> Tensor:
    """Some columns; of draws beyond the limit, other draws."""
    shape = tokens.shape[0], count
    value, classes = (tokens.__dict__.get(mark) for mark in (REAL_VALUE, masks.UNIFORM))
    if value is None and classes is not None:
        part = drawn(shape, tokens.dtype, classes.start, classes.stop)
    else:
        part = torch.empty(shape, dtype=tokens.dtype, device=META)
    if value is not None:
        part.__dict__[REAL_VALUE] = value[:, start : start + count].clone()
    if classes is not None:
        part.__dict__[masks.UNIFORM] = classes
    return part


def random_tokens(shape: tuple[int, ...], vocabulary: int) -> Tensor:
    """Known token ids, drawn uniformly with a fixed seed, without the first few (special) ones.

    They have no values where there are more than MOST_DRAWN.  Raises RequestError for more than
    torch can count.
    """
    first = min(5, vocabulary - 1)
    tokens = drawn(shape, torch.int64, first, vocabulary)
    tokens.__dict__[masks.UNIFORM] = range(first, vocabulary)
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

    return with_tensors(tree, resized)
