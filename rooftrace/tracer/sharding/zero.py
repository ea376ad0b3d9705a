"""States of the optimizer that replicas share, which have weights and gradients whole.

ZeRO-1 (Rajbhandari et al., arXiv:1910.02054) as Megatron-LM's distributed optimizer does it, with
--overlap-grad-reduce and --overlap-param-gather: weights, and gradients in fp32, stand in buckets.
Each replica steps an equal part of every bucket.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rooftrace.tracer import torch_private
from rooftrace.tracer.sharding.ddp import buckets_of, watched

_ELEMENTS = 40_000_000, 1_000_000
"""Elements of a bucket at least, and elements for each replica: the larger is its size
(megatron/core/distributed/distributed_data_parallel.py)."""

_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Newer releases of torch have these names."""


def local_of(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that is here; any other tensor as it is."""
    local = getattr(tensor, "to_local", None)
    return tensor if local is None else local()


def placed_gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient of a parameter, sharded as the parameter is: pending sums are exchanged."""
    gradient, mesh = parameter.grad, getattr(parameter, "device_mesh", None)
    assert gradient is not None
    if mesh is None or gradient.placements == parameter.placements:  # type: ignore[attr-defined]
        return gradient
    return gradient.redistribute(mesh, parameter.placements)  # type: ignore[attr-defined, no-any-return]


class _SharedBucket:
    """Weights of one precision and their fp32 gradients, each in one row of equal parts."""

    def __init__(self, parameters: Sequence[Any], group: Any) -> None:
        self.group, self.missing, self.reduced = group, 0, False
        local = [local_of(parameter.detach()) for parameter in parameters]
        sizes, ranks = [tensor.numel() for tensor in local], int(group.size())
        total = sum(sizes)
        self.weights = local[0].new_empty(total + -total % ranks)
        self.gradients = torch.zeros_like(self.weights, dtype=torch.float32)
        self.places = {}
        rows = [torch.split(row[:total], sizes) for row in (self.weights, self.gradients)]
        for parameter, tensor, *parts in zip(parameters, local, *rows, strict=True):
            weight, self.places[id(parameter)] = (part.view(tensor.shape) for part in parts)
            weight.copy_(tensor)
            if local_of(parameter) is parameter:
                parameter.data = weight
            else:
                parameter._local_tensor = weight
        own = [row.chunk(ranks)[group.rank()] for row in (self.weights, self.gradients)]
        self.part, self.sums = nn.Parameter(own[0]), own[1]
        self.beside = self.weights.is_meta  # exchanges: there, who reads a result waits for it
        self.begin()

    def begin(self) -> None:
        """No gradient has come yet."""
        self.missing, self.reduced = len(self.places), False


class SharedStates:
    """Weights and gradients of which replicas step a part each.

    sets: groups of replicas with the parameters that these have alike.  copies: processes that hold
    the same parts, None for none.  replicas: how many batches gradients are averaged over.
    """

    def __init__(
        self, sets: Sequence[tuple[Any, list[nn.Parameter]]], copies: Any, replicas: int
    ) -> None:
        self._copies, self._replicas = copies, replicas
        self.late = False  # whether all gradients wait for `finish`, behind other microbatches
        self._buckets: list[_SharedBucket] = []
        with torch.no_grad():
            for group, parameters in sets:
                least = max(_ELEMENTS[0], _ELEMENTS[1] * int(group.size()))
                for kind in dict.fromkeys(p.dtype for p in parameters):
                    alike = [p for p in parameters if p.dtype is kind]
                    local: list[Any] = [*map(local_of, alike)]
                    places = buckets_of(local, (least * kind.itemsize,))
                    self._buckets += [_SharedBucket([alike[n] for n in p], group) for p in places]
        self._of = {place: bucket for bucket in self._buckets for place in bucket.places}
        # What this process steps: weights by name, and their gradients by identity.
        self.parts = nn.ParameterDict({f"bucket {n}": b.part for n, b in enumerate(self._buckets)})
        self.sums = {id(bucket.part): bucket.sums for bucket in self._buckets}

    def enter(self, enter: Callable[[Tensor, str, str], None]) -> None:
        """Enter the buckets, each with its kind and name, before the parameters in them."""
        for number, bucket in enumerate(self._buckets):
            enter(bucket.weights, "parameter", f"bucket {number}")
            enter(bucket.gradients, "gradient", f"bucket {number}.grad")

    @contextlib.contextmanager
    def exchanged(self, module: nn.Module, late: bool) -> Iterator[None]:
        """Inside, a forward and a backward run.  late: `finish` reduces all gradients."""
        self.late = late
        if not late:
            self.gather()
        with watched(module, self.ready):
            yield
        self.finish()

    def gather(self) -> None:
        """All parts of the weights, in the order of registration, of steps taken elsewhere."""
        for bucket in reversed(self._buckets):
            if bucket.group.size() > 1:
                part, later = bucket.part.detach(), bucket.beside
                _GATHER(bucket.weights, part, group=bucket.group, async_op=later)

    def ready(self, parameter: nn.Parameter) -> None:
        """A gradient has been accumulated."""
        bucket = self._of[id(parameter)]
        with torch.no_grad():
            bucket.places[id(parameter)].add_(local_of(placed_gradient(parameter)))
            parameter.grad = None
            bucket.missing -= 1
            if not (bucket.missing or self.late):
                self._reduce(bucket)

    def _reduce(self, bucket: _SharedBucket) -> None:
        bucket.reduced = True
        bucket.gradients.mul_(1 / self._replicas)
        sums, later = bucket.sums, bucket.beside
        if bucket.group.size() > 1:
            _SCATTER(sums, bucket.gradients, group=bucket.group, async_op=later)
        if self._copies is not None:
            dist.all_reduce(sums, group=self._copies, async_op=later)

    def finish(self) -> None:
        """Backward is over: buckets are reduced that have not been."""
        with torch.no_grad():
            for bucket in self._buckets:
                if not bucket.reduced:
                    self._reduce(bucket)

    def clear(self) -> None:
        """The step is over: gradients are zeros again."""
        torch_private.foreach_zero_([bucket.gradients for bucket in self._buckets])
        for bucket in self._buckets:
            bucket.begin()


SHARES: WeakKeyDictionary[nn.Module, SharedStates] = WeakKeyDictionary()
"""Modules whose replicas share states of the optimizer."""
