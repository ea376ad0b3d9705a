"""Decode steps as functions of their sizes, and the least batch that is limited by computing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rooftrace.errors import RequestError

Array = NDArray[np.float64]
OfSizes = Callable[[Array, Array], Any]
"""A function of batch and cache length, arrays that broadcast; gives numbers of that shape."""


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A step of one device with `batch` sequences, one new token each, all but routed experts.

    flops: FLOP, a multiply-add is 2.  kv_bytes: bytes of the cache that move.  weight_bytes: bytes
    of weights that move at any batch.  other_bytes: other HBM bytes, for example of activations.
    Routers and shared experts belong here, because each device has them.
    """

    flops: OfSizes
    kv_bytes: OfSizes
    weight_bytes: float
    other_bytes: OfSizes = lambda batch, kv: np.zeros(np.broadcast(batch, kv).shape)

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight_bytes) or self.weight_bytes < 0:
            raise RequestError(
                f"weight_bytes={self.weight_bytes!r:.60}: expected a number of at least 0"
            )


class Experts(Protocol):
    """Routed experts of a step: FLOP, weights and sent bytes of a device by its batch."""

    @property
    def experts(self) -> int:
        """Number of experts of a layer."""

    def flops(self, batch: Array, devices: int) -> Array:
        """FLOP of the device with most experts."""

    def bytes(self, batch: Array, devices: int) -> Array:
        """Bytes of weights that it reads."""

    def link_bytes(self, batch: Array, devices: int) -> Array:
        """Bytes that it sends."""


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Experts of which each token takes `top_k`, by uniform routing; gate, up and down products.

    hidden, width: sizes of an expert's products.  weight_bytes: of an element of the weights.
    dispatch_bytes, combine_bytes: of an element on its way to an expert, and on its way back.
    """

    layers: int
    experts: int
    top_k: int
    hidden: int
    width: int
    weight_bytes: float = 1.0
    dispatch_bytes: float = 1.0
    combine_bytes: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(self)
        if self.top_k > self.experts:
            raise RequestError(f"top_k={self.top_k} of experts={self.experts}: a token takes more")

    def local(self, devices: int) -> int:
        """Experts of a layer on the device that has most."""
        return math.ceil(self.experts / devices)

    def flops(self, batch: Array, devices: int) -> Array:
        """FLOP of the device with most experts, when each of `devices` brings `batch` tokens.

        batch k calls for each device, however many devices: more devices have fewer experts each,
        and bring more tokens.  A call takes 6 hidden width FLOP.
        """
        calls = batch * devices * self.top_k * (self.local(devices) / self.experts)
        return calls * (self.layers * 6.0 * self.hidden * self.width)

    def bytes(self, batch: Array, devices: int) -> Array:
        """Bytes of the weights of the device's experts that some token takes, in expectation.

        An expert is left out by a token with 1 - k/E, and by T tokens with (1 - k/E)^T.
        """
        tokens = batch * devices
        left_out = np.power(1 - self.top_k / self.experts, tokens)
        expert = 3.0 * self.hidden * self.width * self.weight_bytes
        return np.asarray(self.layers * self.local(devices) * (1 - left_out) * expert)

    def link_bytes(self, batch: Array, devices: int) -> Array:
        """Bytes that a device sends, and receives: its tokens to experts elsewhere, and results of
        its own experts back, in every layer.  A share of 1/devices stays at home."""
        each = self.hidden * (self.dispatch_bytes + self.combine_bytes)
        away = (devices - 1) / devices
        return np.asarray(batch * self.top_k * self.layers * each * away)


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of one device: FLOP/s, byte/s of HBM, byte/s of its link in one direction."""

    peak: float
    memory: float
    link: float

    def __post_init__(self) -> None:
        _check_positive(self)


def _check_positive(record: RoutedExperts | Rates) -> None:
    for column in fields(record):
        value = getattr(record, column.name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e300:
            raise RequestError(f"{column.name}={value!r:.60}: expected a number above 0")


# -- exploring -------------------------------------------------------------------------------------
# Each of `devices` has a batch (data parallel) and holds a share of the experts (expert parallel);
# everything else of the model is on each of them.  Computing, HBM and the link overlap perfectly,
# at the rates that are passed: this is the least batch that could do, not a prediction.

BATCHES = tuple(2**n for n in range(15))
COMPUTE, HBM, CACHE, NETWORK = "compute", "HBM", "HBM (KV)", "network"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """One number of devices and one cache length.

    flop_per_kv_byte: FLOP over bytes of cache of a further sequence: the asymptotic intensity where
    only the cache grows with the batch.  flop_per_link_byte: the same over bytes of the link;
    infinite without any.  batch: the least batch of one device, of those tried, with t_comp >=
    alpha max(t_hbm, t_net), or None.  limiter: the longest at that batch, "compute", "HBM" or
    "network"; without such a batch "HBM (KV)" or "network" where this is also the longest of a
    further sequence, so that no larger batch could help, else the longest at the largest batch
    tried.  t_comp, t_hbm, t_net: seconds at that batch, or at the largest one.
    """

    devices: int
    kv: int
    flop_per_kv_byte: float
    flop_per_link_byte: float
    batch: int | None
    limiter: str
    t_comp: float
    t_hbm: float
    t_net: float

    @property
    def global_batch(self) -> int | None:
        """The least batch of all devices together."""
        return None if self.batch is None else self.batch * self.devices

    def to_row(self) -> dict[str, Any]:
        """The fields as a row of a CSV file."""
        return asdict(self)


def explore(
    step: DecodeStep,
    experts: Experts,
    rates: Rates,
    *,
    devices: Sequence[int],
    kv: Sequence[int],
    batches: Sequence[int] = BATCHES,
    alpha: float = 0.9,
) -> tuple[Explored, ...]:
    """The least batch for each number of devices and each cache length, in that order.

    batches: of one device, tried in ascending order.  alpha: the share of the slower of HBM and
    network at which computing counts as the limit.
    Raises RequestError for sizes below 1, more devices than experts, an alpha that is not above 0,
    and a step whose FLOPs or bytes are not finite or below 0.
    """
    for name, sizes in (("devices", devices), ("kv", kv), ("batches", batches)):
        valid = all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in sizes)
        if not len(sizes) or not valid:
            raise RequestError(f"{name}={sizes!r:.60}: expected whole numbers of at least 1")
    if max(devices) > experts.experts:
        raise RequestError(
            f"devices={max(devices)}: {experts.experts} experts are on that many devices at most"
        )
    if not 0 < alpha < float("inf"):
        raise RequestError(f"alpha={alpha!r:.60}: expected a number above 0")
    ordered = sorted(set(batches))
    return tuple(
        _explored(step, experts, rates, parallel, length, ordered, alpha)
        for parallel in devices
        for length in kv
    )


def _explored(
    step: DecodeStep,
    experts: Experts,
    rates: Rates,
    devices: int,
    kv: int,
    batches: Sequence[int],
    alpha: float,
) -> Explored:
    # The last entry is twice the largest batch: for the growth by every further sequence.
    batch = np.array([*batches, 2 * batches[-1]], dtype=np.float64)
    length = np.full_like(batch, kv)
    flops = _checked("flops", step.flops(batch, length), batch) + experts.flops(batch, devices)
    cache = _checked("kv_bytes", step.kv_bytes(batch, length), batch)
    grows = cache + _checked("other_bytes", step.other_bytes(batch, length), batch)
    moved = grows + step.weight_bytes + experts.bytes(batch, devices)
    sent = experts.link_bytes(batch, devices)
    comp, hbm, net = flops / rates.peak, moved / rates.memory, sent / rates.link
    enough = np.flatnonzero(comp[:-1] >= alpha * np.maximum(hbm, net)[:-1])
    place = int(enough[0]) if enough.size else len(batches) - 1
    if enough.size:
        limiter = _slowest({COMPUTE: comp[place], HBM: hbm[place], NETWORK: net[place]})
    else:
        further = {CACHE: _further(grows) / rates.memory, NETWORK: _further(net)}
        limiter = _slowest(further)
        if _further(comp) >= alpha * further[limiter]:  # weights still stand in the way
            limiter = _slowest({HBM: hbm[place], NETWORK: net[place]})
    return Explored(
        devices=devices,
        kv=kv,
        flop_per_kv_byte=_over(_further(flops), _further(cache)),
        flop_per_link_byte=_over(_further(flops), _further(sent)),
        batch=int(batch[place]) if enough.size else None,
        limiter=limiter,
        t_comp=float(comp[place]),
        t_hbm=float(hbm[place]),
        t_net=float(net[place]),
    )


def _checked(name: str, values: Any, batch: Array) -> Array:
    """Values of a function of the step, as numbers for each batch."""
    result = np.asarray(values, dtype=np.float64)
    if result.shape not in ((), batch.shape):
        raise RequestError(
            f"{name} gave the shape {result.shape} for batches of the shape {batch.shape}"
        )
    if not np.isfinite(result).all() or (result < 0).any():
        raise RequestError(f"{name} gave {result.min():g}: expected numbers of at least 0")
    return np.broadcast_to(result, batch.shape)


def _further(values: Array) -> float:
    """The growth by one sequence more beyond the largest batch."""
    return float(values[-1] - values[-2])


def _over(flop: float, size: float) -> float:
    return flop / size if size else float("inf")


def _slowest(seconds: dict[str, float]) -> str:
    return max(seconds, key=lambda name: seconds[name])
