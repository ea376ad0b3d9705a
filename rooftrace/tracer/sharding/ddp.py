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
from rooftrace.tracer.values import trees

_FIRST = 1 << 20
"""Bytes of the first bucket: small, so that the exchange begins early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replication:
    """How a DistributedDataParallel exchanges gradients and buffers."""

    group: Any  # the processes with a replica each
    limits: tuple[int, ...]  # bytes at which the first bucket, and every later one, is full
    views: bool  # gradients are views of the buckets
    buffers: bool  # each forward begins with the buffers of the first process
    hooks: list[tuple[Callable[..., Any], Any]]  # a function that exchanges a bucket, its state
    finds_unused: bool  # processes tell each other which gradients they have


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
        hooks=vars(wrapper).setdefault("_comm_hooks", []),
        finds_unused=bool(
            wrapper.find_unused_parameters
            and not wrapper.static_graph
            and not getattr(wrapper, "skip_all_reduce_unused_params", False)
        ),
    )


class _Bucket:
    """Gradients that are exchanged together; hooks of users get it as a `GradBucket`."""

    def __init__(self, parameters: Sequence[nn.Parameter], views: bool) -> None:
        self._parameters = list(parameters)
        self.missing = len(parameters)
        self.views = views
        self.number, self.ends = 0, False
        self.exchanged: Any = None  # what a hook returns
        self._sizes = [parameter.numel() for parameter in parameters]
        self.flat = parameters[0].detach().new_empty(sum(self._sizes))
        self.places = self._parts()

    def _parts(self) -> dict[int, Tensor]:
        parts = zip(torch.split(self.flat, self._sizes), self._parameters, strict=True)
        return {id(p): part.view(p.shape) for part, p in parts}

    def index(self) -> int:
        """Its place among the buckets."""
        return self.number

    def is_last(self) -> bool:
        """Whether it is exchanged last."""
        return self.ends

    def buffer(self) -> Tensor:
        """All gradients in one row."""
        return self.flat

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of its gradients."""
        return self._parameters

    def gradients(self) -> list[Tensor]:
        """Views of the buffer."""
        return list(self.places.values())

    def set_buffer(self, tensor: Tensor) -> None:
        """Put another row in place of the buffer."""
        self.flat = tensor
        self.places = self._parts()

    def take(self, parameter: nn.Parameter, ranks: int) -> None:
        """Put the gradient of a parameter into its place, divided by the number of replicas."""
        place, gradient = self.places[id(parameter)], parameter.grad
        if gradient is None:
            return
        if ranks > 1:
            torch.mul(gradient, 1 / ranks, out=place)
        else:
            place.copy_(gradient)
        if self.views:
            parameter.grad = place
        self.missing -= 1

    def give_back(self) -> None:
        """Write the sums into the gradients."""
        if self.exchanged is not None:
            row, self.exchanged = self.exchanged.wait(), None
            row = row[0] if isinstance(row, list) else row
            if row is not self.flat:
                self.flat.copy_(row.view_as(self.flat))
        for parameter in self._parameters:
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
            self._used = trained[0].new_empty(len(trained), dtype=torch.int32)
        for number, bucket in enumerate(self._buckets):
            bucket.number, bucket.ends = number, number + 1 == len(self._buckets)
        self._of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters()}
        self._next = 0

    def begin(self) -> None:
        """A backward pass begins: no gradient has come yet."""
        self._next = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters())

    @property
    def flats(self) -> list[Tensor]:
        """The buckets as tensors: they are allocated once, for all steps."""
        used = [self._used] if self._how.finds_unused else []
        return [*(bucket.flat for bucket in self._buckets), *used]

    def ready(self, parameter: nn.Parameter) -> None:
        """A gradient has been accumulated."""
        with torch.no_grad():  # hooks divide themselves
            self._of[id(parameter)].take(parameter, 1 if self._how.hooks else self._ranks)
            self._exchange()

    def _exchange(self) -> None:
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._reduce(self._buckets[self._next])
            self._next += 1

    def _reduce(self, bucket: _Bucket) -> None:
        import torch.distributed as dist

        if self._how.hooks:
            hook, state = self._how.hooks[-1]
            with _results_known():
                bucket.exchanged = hook(state, bucket)
        else:
            dist.all_reduce(bucket.flat, group=self._how.group, async_op=True)
        if bucket.ends and self._how.finds_unused:
            dist.all_reduce(self._used, group=self._how.group, async_op=True)

    def warm(self) -> None:
        """Call the hook once for each bucket, so that its state is that of a later step."""
        with torch.no_grad():
            for bucket in self._buckets if self._how.hooks else ():
                self._reduce(bucket)
                bucket.exchanged = None

    def finish(self) -> None:
        """Backward is over: the last buckets are exchanged too, and all sums given back."""
        with torch.no_grad():
            for bucket in self._buckets[self._next :]:
                self._reduce(bucket)
            for bucket in self._buckets:
                bucket.give_back()


@contextlib.contextmanager
def _results_known() -> Iterator[None]:
    """Inside, futures of exchanges hold the tensors that they write, as those of real ones do."""
    import torch.distributed as dist

    home: Any = dist

    def known(exchange: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(exchange)
        def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            work = exchange(tensor, *args, **kwargs)
            return work and _Known(work, tensor if isinstance(tensor, list) else [tensor])

        return call

    with _lent(home, {name: known(getattr(home, name)) for name in _EXCHANGES}):
        yield


_EXCHANGES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "broadcast",
    "reduce",
)
"""Functions of torch.distributed whose first argument is what they write."""


class _Known:
    """The handle of an exchange, whose future has its result."""

    def __init__(self, work: Any, tensors: list[Tensor]) -> None:
        self._work, self._tensors = work, tensors

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future that has come."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


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
        for module in trees.modules_in(root)
        if isinstance(module, nn.parallel.DistributedDataParallel)
    ]
    with contextlib.ExitStack() as undo:
        for wrapper in dict.fromkeys(wrappers):
            loose: Any = wrapper
            how = replication_of(wrapper)
            reducer = undo.enter_context(reducer_of(loose.module, how, apart, enter, say))
            exchange = _Exchange(reducer)
            undo.enter_context(watched(loose.module, exchange.ready))
            share = functools.partial(share_buffers, loose.module, how)
            stand_ins = {"reducer": exchange, "logger": _NoReducer(), "_sync_buffers": share}
            undo.enter_context(_lent(wrapper, stand_ins))
        yield


@contextlib.contextmanager
def reducer_of(
    module: nn.Module,
    how: Replication,
    apart: Callable[[], contextlib.AbstractContextManager[None]],
    enter: Callable[[Tensor, str, str], None],
    say: Callable[[str, str], object],
) -> Iterator[Reducer]:
    """Inside, the reducer of a module's gradients; see `replicated`.

    Hooks may change their states, which are afterwards as before.
    """
    with contextlib.ExitStack() as undo:
        for hook, state in how.hooks:
            say("communication", hooked_by(hook))
            undo.enter_context(_as_before(vars(state) if hasattr(state, "__dict__") else {}))
        with apart():
            reducer = Reducer(module, how)
            reducer.warm()
        for number, flat in enumerate(reducer.flats):
            enter(flat, "gradient", f"bucket {number}")
        yield reducer


def hooked_by(hook: Any) -> str:
    """The assumption on a wrapper with a communication hook."""
    return (
        f"{getattr(hook, '__qualname__', type(hook).__name__)} exchanges the gradients of "
        "DistributedDataParallel: it is called with its state as it is now, after one call for "
        "each bucket that is not counted"
    )


@contextlib.contextmanager
def _as_before(held: dict[str, Any]) -> Iterator[None]:
    before = {n: v.copy() if isinstance(v, (dict, list, set)) else v for n, v in held.items()}
    try:
        yield
    finally:
        held.clear()
        held.update(before)


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


_REGISTER = "_register_comm_hook"


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

    def hook_registered(reducer: Any, *args: Any) -> None:
        if not isinstance(reducer, _NoReducer):
            original_hook(reducer, *args)

    groups: Any = torch.distributed
    original_hook = getattr(groups, _REGISTER)
    changed.append((groups, _REGISTER, original_hook))
    setattr(groups, _REGISTER, hook_registered)
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

    def hooked(wrapper: Any, state: Any, hook: Callable[..., Any]) -> None:
        say("communication", hooked_by(hook))
        wrapper._comm_hooks.append((hook, state))

    methods = {"_ddp_init_helper": init_helper, "register_comm_hook": hooked}
    checks = dict.fromkeys(
        ("_verify_param_shape_across_processes", "_sync_module_states"), lambda *_, **__: None
    )
    put(home.DistributedDataParallel, methods)
    put(home, checks)
