"""Notes of a step that runs: calls told apart by their arguments, gradients, and optimizers."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from rooftrace.tracer.torch_private import tree_leaves
from rooftrace.tracer.values import inputs_on_meta, masks, tensors_in

_PLAIN = (int, float, bool, str, type(None))
_NO_SIZE = frozenset(("num_items_in_batch",))
"""Arguments whose value changes from step to step, and no work with it."""
_SIMPLE = (Tensor, *_PLAIN)
_TOKENS = ("input_ids", "decoder_input_ids")

CallSizes = tuple[
    tuple[tuple[torch.Size, torch.dtype, bool], ...], tuple[Any, ...], tuple[str, ...]
]
"""Size, dtype and need of a gradient of each tensor among arguments; plain values; names."""


@dataclass(frozen=True, slots=True)
class ItemCount:
    """How many items a call has, and what they are."""

    samples: int = 0
    tokens: int = 0


def sizes_of(args: Sequence[Any], kwargs: dict[str, Any]) -> CallSizes:
    """What tells calls apart: sizes of tensors, plain values, names.  It runs in every step."""
    leaves: list[Any] = [*args, *(kwargs[name] for name in kwargs if name not in _NO_SIZE)]
    tensors: list[Any] = [item for item in leaves if isinstance(item, Tensor)]
    if not all(isinstance(item, _SIMPLE) for item in leaves):
        tree = tuple(leaves)
        tensors = tensors_in(tree)
        leaves = tree_leaves(tree, is_leaf=lambda item: item is None)
    plain = tuple(
        leaf if isinstance(leaf, _PLAIN) else type(leaf).__name__
        for leaf in leaves
        if not isinstance(leaf, Tensor)
    )
    return tuple((t.shape, t.dtype, t.requires_grad) for t in tensors), plain, tuple(kwargs)


def counted_in(args: Sequence[Any], kwargs: dict[str, Any]) -> ItemCount:
    """Samples, and tokens where the call has any: whole numbers [batch, length], or embeddings.

    Tokens are those that the call runs, padding included.
    """
    tensors = tensors_in((tuple(args), kwargs))
    if not tensors:
        return ItemCount()
    ids = next((kwargs[n] for n in _TOKENS if isinstance(kwargs.get(n), Tensor)), None)
    embedded = kwargs.get("inputs_embeds")
    if ids is None and isinstance(embedded, Tensor) and embedded.dim() == 3:
        return ItemCount(int(embedded.shape[0]), int(embedded.shape[0] * embedded.shape[1]))
    first = tensors[0] if ids is None else ids
    if not first.dim():
        return ItemCount()
    whole = first.dtype in (torch.int32, torch.int64) and first.dim() == 2
    return ItemCount(int(first.shape[0]), int(first.numel()) if whole else 0)


# -- notes -----------------------------------------------------------------------------------------
# What a real step does, noted while it runs: calls of modules, gradients, optimizers that stepped.
#
# A note has sizes and meta twins of the arguments, never their data, so that a step of any size
# can be traced later.  Hooks are there for the length of a step alone, and none inside of
# compiled code.

_AUTOCAST = ("cpu", "cuda")
_WRAPPERS = ("_orig_mod", "module")
"""Where torch.compile, and DistributedDataParallel, keep the module that they stand around."""


@dataclass(frozen=True, slots=True)
class CallNote:
    """Calls of one kind: with these sizes and settings, and with these gradients.

    Equal notes are of equal work.  module: its number among the modules of the session.
    """

    module: int
    sizes: CallSizes
    training: bool
    gradients: bool  # whether autograd recorded it
    autocast: tuple[tuple[str, torch.dtype], ...]  # devices on which it was on
    roots: tuple[int, ...] = ()  # outputs that a gradient came into, by their number
    backwards: int = 0  # how many times


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The arguments of a call on meta, and the mode of each part of the module as it ran."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    training: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class StepPattern:
    """What a step did, in whatever order: equal patterns are equal work."""

    calls: frozenset[tuple[CallNote, int]]  # kinds of calls, and how often each ran
    optimizers: tuple[int, ...]  # by their number in the session, as often as they stepped


@dataclass(frozen=True, slots=True)
class StepNote:
    """What one step did, in order."""

    calls: tuple[CallNote, ...]
    optimizers: tuple[int, ...]
    counted: ItemCount

    @property
    def pattern(self) -> StepPattern:
        """What it did, in whatever order."""
        return StepPattern(frozenset(Counter(self.calls).items()), tuple(sorted(self.optimizers)))


@dataclass(slots=True)
class _Running:
    """A call of this step; hooks on its outputs say where gradients came in."""

    note: CallNote
    fires: dict[int, int] = field(default_factory=dict)
    scalars: set[int] = field(default_factory=set)

    def done(self) -> CallNote:
        """The note, with the outputs from which a backward began.

        A scalar that got a gradient is the loss; other outputs may have theirs through it.
        """
        roots = sorted(self.fires.keys() & self.scalars) or sorted(self.fires)
        backwards = max((self.fires[root] for root in roots), default=0)
        return replace(self.note, roots=tuple(roots), backwards=backwards)


class Notebook:
    """Notes the steps of some modules: `with notebook.step():` around each, then `take()`.

    hooks: whether calls are seen by hooks; else the loop tells them (`begin`, `watch`).
    most: of so many kinds of calls the arguments are kept.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        items: Callable[..., int] | None = None,
        hooks: bool = True,
        most: int = 32,
    ) -> None:
        self._most = most
        self._hooked = tuple(enumerate(modules)) if hooks else ()
        self.called = tuple(modules)
        self.modules = tuple(unwrapped(module) for module in modules)
        self.arguments: dict[CallNote, CallArguments] = {}  # by the note before any gradient
        self.optimizers: list[Optimizer] = []
        self._items = items
        self._counts: dict[CallNote, ItemCount] = {}
        self._own = {id(p) for module in self.modules for p in module.parameters()}
        self._depth = 0
        self._calls: list[_Running] = []
        self._stepped: list[int] = []
        self._samples = self._tokens = 0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One step: what it does is noted."""
        self._depth, self._calls, self._stepped = 0, [], []
        self._samples = self._tokens = 0
        with contextlib.ExitStack() as undo:
            undo.callback(register_optimizer_step_post_hook(self._on_optimizer).remove)
            for number, module in self._hooked:
                self._attach(number, module, undo)
            yield

    def take(self) -> StepNote:
        """What the last step did."""
        return StepNote(
            tuple(call.done() for call in self._calls),
            tuple(self._stepped),
            ItemCount(self._samples, self._tokens),
        )

    # -- calls -------------------------------------------------------------------------------------

    def _attach(self, number: int, module: nn.Module, undo: contextlib.ExitStack) -> None:
        compiled = getattr(module, "_compiled_call_impl", None)
        if compiled is None:
            before = partial(self._before, number)
            hook = module.register_forward_pre_hook(before, with_kwargs=True)
            undo.callback(hook.remove)
            undo.callback(module.register_forward_hook(self._after).remove)
            return

        def around(*args: Any, **kwargs: Any) -> Any:  # outside of what `module.compile()` compiled
            self._before(number, module, args, kwargs)
            output = compiled(*args, **kwargs)
            self._after(module, args, output)
            return output

        module._compiled_call_impl = around
        undo.callback(setattr, module, "_compiled_call_impl", compiled)

    def _before(self, number: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth += 1
        if self._depth == 1:
            self.begin(number, args, kwargs)

    def begin(self, number: int, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Note a call that begins; its arguments are kept where it is the first of its kind."""
        note = CallNote(
            module=number,
            sizes=sizes_of(args, kwargs),
            training=self.called[number].training,
            gradients=torch.is_grad_enabled(),
            autocast=tuple(
                (device, torch.get_autocast_dtype(device))
                for device in _AUTOCAST
                if torch.is_autocast_enabled(device)
            ),
        )
        if note not in self._counts:
            self._counts[note] = counted_in(args, kwargs)
            if len(self.arguments) < self._most:
                self.arguments[note] = self._kept(number, args, kwargs)
        self._calls.append(_Running(note))
        if number == 0:
            counted = self._counts[note]
            if self._items is not None:
                counted = ItemCount(int(self._items(*args, **kwargs)))
            self._samples += counted.samples
            self._tokens += counted.tokens

    def _kept(self, number: int, args: Sequence[Any], kwargs: dict[str, Any]) -> CallArguments:
        """The arguments of a call on meta, without the batch itself, which would stay in memory."""
        with torch.inference_mode(False), torch.no_grad():
            on_meta, named = inputs_on_meta((tuple(args), dict(kwargs)))
        for twin in tensors_in((on_meta, named)):
            twin.__dict__.pop(masks.REAL, None)
        modes = tuple(part.training for part in self.modules[number].modules())
        return CallArguments(on_meta, named, modes)

    def arguments_of(self, note: CallNote) -> CallArguments | None:
        """The arguments of calls of a kind; None where they were not kept."""
        return self.arguments.get(replace(note, roots=(), backwards=0))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth -= 1
        if self._depth == 0 and self._calls and torch.is_grad_enabled():
            self.watch(output)

    def watch(self, output: Any) -> None:
        """Note which tensors of the output of the last call get a gradient."""
        call = self._calls[-1]
        for index, tensor in enumerate(tensors_in(output)):
            if tensor.requires_grad and tensor.grad_fn is not None:
                if tensor.dim() == 0:
                    call.scalars.add(index)
                hooked: Any = tensor
                hooked.register_hook(partial(_fired, call, index))

    # -- optimizers --------------------------------------------------------------------------------

    def _on_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for number, known in enumerate(self.optimizers):
            if known is optimizer:
                self._stepped.append(number)
                return
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        if any(id(p) in self._own for p in parameters):
            self.optimizers.append(optimizer)
            self._stepped.append(len(self.optimizers) - 1)


def _fired(call: _Running, index: int, gradient: Tensor) -> None:
    call.fires[index] = call.fires.get(index, 0) + 1


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's module inside of torch.compile's and DistributedDataParallel's wrappers."""
    while True:
        wraps = "_orig_mod" in module._modules or isinstance(
            module, nn.parallel.DistributedDataParallel
        )
        inner = next((module._modules[n] for n in _WRAPPERS if n in module._modules), None)
        if not wraps or inner is None:
            return module
        module = inner


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of a module go through torch.compile."""
    parts = [module, *module._modules.values()]
    return any(
        part is not None
        and ("_orig_mod" in part._modules or getattr(part, "_compiled_call_impl", None) is not None)
        for part in parts
    )
