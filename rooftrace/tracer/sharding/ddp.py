"""DistributedDataParallel: its exchange of gradients, in buckets, during the backward pass.

Its reducer is C++ that writes into real memory.  What it does is done here by ops that a recording
sees: a gradient that is ready is scaled into its place in a bucket; a bucket whose gradients are
all there is all-reduced during the rest of backward, in the order of the buckets; at the end the
sums go back into the gradients, unless these are views of the buckets.

Buckets are filled in the reverse order of registration, as in the first step; later steps of torch
fill them in the order in which gradients came, which is mostly the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rooftrace.tracer import torch_private
from rooftrace.tracer.recording import put

HOOKED = (
    "a hook of the user's exchanges the gradients of DistributedDataParallel: they are counted as "
    "they are exchanged without it"
)
"""The assumption on a wrapper with a communication hook."""

_FIRST = 1 << 20
"""Bytes of the first bucket: small, so that the exchange begins early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replication:
    """How a DistributedDataParallel exchanges gradients and buffers."""

    group: Any  # the processes with a replica each
    limits: tuple[int, ...]  # bytes at which the first bucket, and every later one, is full
    views: bool  # gradients are views of the buckets
    buffers: bool  # each forward begins with the buffers of the first process
    hooked: bool  # a hook of the user's exchanges gradients in another way


def replication_of(wrapper: Any) -> Replication:
    """How a DistributedDataParallel is set up."""
    cap = int(wrapper.bucket_bytes_cap)
    usual = getattr(wrapper, "bucket_bytes_cap_default", False)
    listed = getattr(wrapper, "bucket_bytes_cap_list", ())  # in newer releases
    return Replication(
        group=wrapper.process_group,
        limits=tuple(listed) or ((min(_FIRST, cap), cap) if usual else (cap,)),
        views=bool(wrapper.gradient_as_bucket_view),
        buffers=bool(wrapper.broadcast_buffers and wrapper.require_forward_param_sync),
        hooked=bool(getattr(wrapper, "_comm_hooks", ())),
    )


class _Bucket:
    """Gradients that are exchanged together."""

    def __init__(self, parameters: Sequence[nn.Parameter], views: bool) -> None:
        self.parameters = list(parameters)
        self.missing = len(self.parameters)
        self.views = views
        sizes = [parameter.numel() for parameter in self.parameters]
        self.flat = self.parameters[0].detach().new_empty(sum(sizes))
        parts = zip(torch.split(self.flat, sizes), self.parameters, strict=True)
        self.places = {id(p): part.view(p.shape) for part, p in parts}

    def take(self, parameter: nn.Parameter, ranks: int) -> None:
        """Put the gradient of a parameter into its place, divided by the number of replicas."""
        place, gradient = self.places[id(parameter)], parameter.grad
        if gradient is None:
            return
        torch.mul(gradient, 1 / ranks, out=place)
        if self.views:
            parameter.grad = place
        self.missing -= 1

    def give_back(self) -> None:
        """Write the sums into the gradients."""
        for parameter in self.parameters:
            if not self.views and parameter.grad is not None:
                parameter.grad.copy_(self.places[id(parameter)])


def buckets_of(parameters: Sequence[nn.Parameter], limits: Sequence[int]) -> list[list[int]]:
    """Places of the parameters of each bucket, in the order in which buckets are exchanged.

    A bucket of one precision is closed when it has reached its limit: the first limit for the
    first one, the last for all others.
    """
    filling: dict[torch.dtype, list[int]] = {}
    sizes: dict[torch.dtype, int] = {}
    closed: dict[torch.dtype, int] = {}
    buckets: list[list[int]] = []
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        kind = parameter.dtype
        filling.setdefault(kind, []).append(index)
        sizes[kind] = sizes.get(kind, 0) + parameter.numel() * parameter.element_size()
        if sizes[kind] >= limits[min(closed.get(kind, 0), len(limits) - 1)]:
            buckets.append(filling.pop(kind))
            sizes[kind], closed[kind] = 0, closed.get(kind, 0) + 1
    return [*buckets, *filling.values()]


class Reducer:
    """Exchanges the gradients of one backward pass."""

    def __init__(self, module: nn.Module, how: Replication) -> None:
        trained = [p for p in module.parameters() if p.requires_grad]
        self._how, self._ranks = how, int(how.group.size())
        with torch.no_grad():
            self._buckets = [
                _Bucket([trained[place] for place in places], how.views)
                for places in buckets_of(trained, how.limits)
            ]
        self._of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        self._next = 0

    def begin(self) -> None:
        """A backward pass begins: no gradient has come yet."""
        self._next = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    @property
    def flats(self) -> list[Tensor]:
        """The buckets as tensors: they are allocated once, for all steps."""
        return [bucket.flat for bucket in self._buckets]

    def ready(self, parameter: nn.Parameter) -> None:
        """A gradient has been accumulated."""
        with torch.no_grad():
            self._of[id(parameter)].take(parameter, self._ranks)
            self._exchange()

    def _exchange(self) -> None:
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._reduce(self._buckets[self._next])
            self._next += 1

    def _reduce(self, bucket: _Bucket) -> None:
        import torch.distributed as dist

        dist.all_reduce(bucket.flat, group=self._how.group, async_op=True)

    def finish(self) -> None:
        """Backward is over: the last buckets are exchanged too, and all sums given back."""
        with torch.no_grad():
            for bucket in self._buckets[self._next :]:
                self._reduce(bucket)
            for bucket in self._buckets:
                bucket.give_back()


def share_buffers(module: nn.Module, how: Replication) -> None:
    """The first work of a forward: all replicas get the buffers of the first process."""
    import torch.distributed as dist

    buffers = list(nn.Module.buffers(module))
    if not how.buffers or not buffers:
        return
    with torch.no_grad():
        for kind in dict.fromkeys(buffer.dtype for buffer in buffers):
            alike = [buffer for buffer in buffers if buffer.dtype is kind]
            flat = torch.cat([buffer.reshape(-1) for buffer in alike])
            dist.broadcast(flat, 0, group=how.group)
            sizes = [buffer.numel() for buffer in alike]
            parts: Any = torch.split(flat, sizes)
            torch_private.foreach_copy_(
                alike, [part.view_as(b) for part, b in zip(parts, alike, strict=True)]
            )


@contextlib.contextmanager
def watched(module: nn.Module, ready: Callable[[nn.Parameter], None]) -> Iterator[None]:
    """Inside, `ready` is called with each parameter whose gradient has been accumulated."""
    trained: list[Any] = [p for p in module.parameters() if p.requires_grad]
    handles: list[RemovableHandle] = [p.register_post_accumulate_grad_hook(ready) for p in trained]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _NoReducer:
    """Stands for the reducer and the logger of replicas on meta: does nothing."""

    def _rebuild_buckets(self) -> bool:
        return False

    def _get_ddp_logging_data(self) -> Any:
        return SimpleNamespace(strs_map={}, ints_map={})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class _Exchange(_NoReducer):
    """Stands for the reducer of a wrapper while its forward and backward are recorded."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer, self._armed, self._running = reducer, False, False

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """The last work of a forward whose gradients are exchanged (not inside no_sync)."""
        self._armed = True

    def ready(self, parameter: nn.Parameter) -> None:
        """A gradient has been accumulated."""
        if not self._armed:
            return
        if not self._running:
            self._running = True
            self._reducer.begin()
            torch_private.execution_engine.queue_callback(self._finish)
        self._reducer.ready(parameter)

    def _finish(self) -> None:
        self._armed = self._running = False
        self._reducer.finish()


@contextlib.contextmanager
def replicated(
    roots: Sequence[nn.Module],
    apart: Callable[[], contextlib.AbstractContextManager[None]],
    enter: Callable[[Tensor, str, str], None],
    say: Callable[[str, str], object],
) -> Iterator[None]:
    """Inside, wrappers below these roots exchange by ops that a recording sees.

    apart: a context in which ops are not recorded.  enter: called with each bucket, the kind of
    its values, and its name.  say: called with the kind and the text of each assumption.
    """
    wrappers = [
        module
        for root in roots
        for module in root.modules()
        if isinstance(module, nn.parallel.DistributedDataParallel)
    ]
    with contextlib.ExitStack() as undo:
        for wrapper in dict.fromkeys(wrappers):
            loose: Any = wrapper
            how = replication_of(wrapper)
            if how.hooked:
                say("communication", HOOKED)
            with apart():
                reducer = Reducer(loose.module, how)
            for number, flat in enumerate(reducer.flats):
                enter(flat, "gradient", f"bucket {number}")
            exchange = _Exchange(reducer)
            undo.enter_context(watched(loose.module, exchange.ready))
            share = functools.partial(share_buffers, loose.module, how)
            stand_ins = {"reducer": exchange, "logger": _NoReducer(), "_sync_buffers": share}
            undo.enter_context(_lent(wrapper, stand_ins))
        yield


@contextlib.contextmanager
def _lent(owner: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Inside, an object has these instance attributes."""
    held = vars(owner)
    before = {name: held[name] for name in attributes if name in held}
    held.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            held.pop(name, None)
        held.update(before)


@contextlib.contextmanager
def replicas_on_meta() -> Iterator[None]:
    """Inside, DistributedDataParallel takes modules on meta: it compares and copies no weights."""
    import torch.nn.parallel.distributed as home

    kind: Any = home.DistributedDataParallel
    changed: list[tuple[Any, str, Any]] = []

    def unless_on_meta(place: Any, name: str, tensors_of: Callable[..., Any]) -> None:
        original = getattr(place, name, None)
        if original is None:
            return

        def function(*args: Any, **kwargs: Any) -> Any:
            if any(tensor.is_meta for tensor in tensors_of(*args, **kwargs)):
                return None
            return original(*args, **kwargs)

        changed.append((place, name, original))
        setattr(place, name, function)

    original_helper = kind._ddp_init_helper

    def init_helper(self: Any, parameters: Any, *args: Any, **kwargs: Any) -> None:
        if any(parameter.is_meta for parameter in parameters):
            self.reducer = self.logger = _NoReducer()
        else:
            original_helper(self, parameters, *args, **kwargs)

    unless_on_meta(home, "_verify_param_shape_across_processes", lambda group, tensors, *_: tensors)
    unless_on_meta(home, "_sync_module_states", lambda module, **_: module.parameters())
    changed.append((kind, "_ddp_init_helper", original_helper))
    kind._ddp_init_helper = init_helper
    try:
        yield
    finally:
        for place, name, original in reversed(changed):
            setattr(place, name, original)


def replicas_of_program(say: Callable[[str, str], object]) -> None:
    """From here on each DistributedDataParallel exchanges by ops that a recording sees.

    Its processes are not there, so it compares and sends no weights, wherever these are.  say:
    called with the kind and the text of each assumption.
    """
    import torch.nn.parallel.distributed as home

    def init_helper(wrapper: Any, *args: Any, **kwargs: Any) -> None:
        wrapper.reducer = wrapper.logger = _NoReducer()
        how = replication_of(wrapper)
        exchange = _Exchange(Reducer(wrapper.module, how))
        trained = [p for p in wrapper.module.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(exchange.ready)
        wrapper.reducer = exchange
        wrapper._sync_buffers = functools.partial(share_buffers, wrapper.module, how)

    def hooked(wrapper: Any, *args: Any, **kwargs: Any) -> None:
        say("communication", HOOKED)

    methods = {"_ddp_init_helper": init_helper, "register_comm_hook": hooked}
    checks = dict.fromkeys(
        ("_verify_param_shape_across_processes", "_sync_module_states"), lambda *_, **__: None
    )
    put(home.DistributedDataParallel, methods)
    put(home, checks)
