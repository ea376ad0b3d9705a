"""Notes of a running step: its calls of modules by kind, their gradients, and optimizers.

A note has sizes and meta copies of the arguments, never their data, so that a step of any size can
be traced later.  Hooks exist only during a step, and none inside of compiled code.
"""

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
"""Arguments whose value changes between steps without changing the work."""
_SIMPLE = (Tensor, *_PLAIN)
_TOKENS = ("input_ids", "decoder_input_ids")

CallSizes = tuple[
    tuple[tuple[torch.Size, torch.dtype, bool], ...], tuple[Any, ...], tuple[str, ...]
]
"""Size, dtype and need of a gradient of each tensor among arguments; plain values; names."""


@dataclass(frozen=True, slots=True)
class ItemCount:
    """The numbers of items of a call."""

    samples: int = 0
    tokens: int = 0


def sizes_of(args: Sequence[Any], kwargs: dict[str, Any]) -> CallSizes:
    """The key of a kind of calls: sizes of tensors, plain values, names.  Runs in every step."""
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
    """Samples, and tokens where the call has integers [batch, length] or embeddings.

    Padding counts as tokens.
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
    are_ids = first.dtype in (torch.int32, torch.int64) and first.dim() == 2
    return ItemCount(int(first.shape[0]), int(first.numel()) if are_ids else 0)


# -- notes -----------------------------------------------------------------------------------------

_AUTOCAST = ("cpu", "cuda")
_WRAPPERS = ("_orig_mod", "module")
"""Attributes of torch.compile and DistributedDataParallel with the module that they wrap."""


@dataclass(frozen=True, slots=True)
class CallNote:
    """Calls of one kind: with equal sizes, settings and gradients, so of equal work.

    module: its number among the modules of the session.
    """

    module: int
    sizes: CallSizes
    training: bool
    gradients: bool  # whether autograd recorded it
    autocast: tuple[tuple[str, torch.dtype], ...]  # devices on which it was on
    roots: tuple[int, ...] = ()  # numbers of outputs from which a backward began
    backwards: int = 0  # number of backward passes


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The arguments of a call on meta, and the mode of each part of the module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    training: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class StepPattern:
    """The work of a step, without its order."""

    calls: frozenset[tuple[CallNote, int]]  # (kind of calls, count)
    optimizers: tuple[int, ...]  # by their number in the session, once for each step


@dataclass(frozen=True, slots=True)
class StepNote:
    """The work of one step, in order."""

    calls: tuple[CallNote, ...]
    optimizers: tuple[int, ...]
    counted: ItemCount

    @property
    def pattern(self) -> StepPattern:
        """The work without its order."""
        return StepPattern(frozenset(Counter(self.calls).items()), tuple(sorted(self.optimizers)))


@dataclass(slots=True)
class _RunningCall:
    """A call of this step; hooks on its outputs note gradients."""

    note: CallNote
    fires: dict[int, int] = field(default_factory=dict)
    scalars: set[int] = field(default_factory=set)

    def done(self) -> CallNote:
        """The note, with the outputs from which a backward began.

        A scalar with a gradient is the loss; other outputs may have gradients through it.
        """
        roots = sorted(self.fires.keys() & self.scalars) or sorted(self.fires)
        backwards = max((self.fires[root] for root in roots), default=0)
        return replace(self.note, roots=tuple(roots), backwards=backwards)


class Notebook:
    """Notes the steps of some modules: `with notebook.step():` around each, then `take()`.

    hooks: whether hooks note calls; else the loop does (`begin`, `watch`).
    most: number of kinds of calls whose arguments are kept.
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
        self._parameters = {id(p) for module in self.modules for p in module.parameters()}
        self._depth = 0
        self._calls: list[_RunningCall] = []
        self._stepped: list[int] = []
        self._samples = self._tokens = 0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One step: its work is noted."""
        self._depth, self._calls, self._stepped = 0, [], []
        self._samples = self._tokens = 0
        with contextlib.ExitStack() as undo:
            undo.callback(register_optimizer_step_post_hook(self._on_optimizer).remove)
            for number, module in self._hooked:
                self._attach(number, module, undo)
            yield

    def take(self) -> StepNote:
        """The note of the last step."""
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

        def around(*args: Any, **kwargs: Any) -> Any:  # outside of the code of `module.compile()`
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
        """Note a call that begins; the first of its kind keeps its arguments."""
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
        self._calls.append(_RunningCall(note))
        if number == 0:
            counted = self._counts[note]
            if self._items is not None:
                counted = ItemCount(int(self._items(*args, **kwargs)))
            self._samples += counted.samples
            self._tokens += counted.tokens

    def _kept(self, number: int, args: Sequence[Any], kwargs: dict[str, Any]) -> CallArguments:
        """The arguments of a call on meta, without references to the batch."""
        with torch.inference_mode(False), torch.no_grad():
            on_meta, named = inputs_on_meta((tuple(args), dict(kwargs)))
        for tensor in tensors_in((on_meta, named)):
            tensor.__dict__.pop(masks.REAL, None)
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
        for number, other in enumerate(self.optimizers):
            if other is optimizer:
                self._stepped.append(number)
                return
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        if any(id(p) in self._parameters for p in parameters):
            self.optimizers.append(optimizer)
            self._stepped.append(len(self.optimizers) - 1)


def _fired(call: _RunningCall, index: int, gradient: Tensor) -> None:
    call.fires[index] = call.fires.get(index, 0) + 1


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside of wrappers of torch.compile and DistributedDataParallel."""
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
