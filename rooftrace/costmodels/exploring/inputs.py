"""What an exploration is of: a decode step as functions of its sizes, its experts, and rates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
OfSizes = Callable[[Array, Array], Any]
"""A function of batch and cache length, arrays that broadcast; gives numbers of that shape."""


class ExploreError(ValueError):
    """Sizes or rates that no step has."""


def _nothing(batch: Array, kv: Array) -> Array:
    return np.zeros(np.broadcast(batch, kv).shape)


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A step of one device with `batch` sequences, one new token each, all but routed experts.

    flops: FLOP, a multiply-add is 2.  kv_bytes: bytes of the cache that move.  weight_bytes: bytes
    of weights that move whatever the batch.  other_bytes: what else moves through HBM, for example
    activations.  Routers and shared experts belong here, because each device has them.
    """

    flops: OfSizes
    kv_bytes: OfSizes
    weight_bytes: float
    other_bytes: OfSizes = _nothing

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight_bytes) or self.weight_bytes < 0:
            raise ExploreError(
                f"weight_bytes={self.weight_bytes!r:.60}: expected a number of at least 0"
            )


class Experts(Protocol):
    """Routed experts of a step: what a device computes, reads and sends for a batch of its own."""

    @property
    def experts(self) -> int:
        """Of a layer."""

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
            raise ExploreError(f"top_k={self.top_k} of experts={self.experts}: a token takes more")

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
            raise ExploreError(f"{column.name}={value!r:.60}: expected a number above 0")
