"""The least batch for each device with which a decode step is limited by computing.

Each of `devices` brings its own batch (data parallel) and holds a share of the experts (expert
parallel); everything else of the model is on each of them.  Computing, HBM and the link overlap
perfectly, at the rates that are passed: this is the least batch that could do, not a prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rooftrace.costmodels.exploring.inputs import (
    Array,
    DecodeStep,
    Experts,
    ExploreError,
    Rates,
)

BATCHES = tuple(2**n for n in range(15))
COMPUTE, HBM, CACHE, NETWORK = "compute", "HBM", "HBM (KV)", "network"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """One number of devices and one cache length.

    flop_per_kv_byte: what a further sequence adds in FLOP, over the bytes of cache that it adds:
    the intensity that a batch without end approaches where the cache is all that grows.
    flop_per_link_byte: the same over bytes of the link; infinite without any.  batch: the least
    batch of one device, of those tried, with t_comp >= alpha max(t_hbm, t_net); None where there is
    none.  limiter: what takes longest at that batch, "compute", "HBM" or "network".  Without such
    a batch "HBM (KV)" or "network" where no larger one could help either, because this is what a
    further sequence takes longest of; else what takes longest at the largest batch tried.
    t_comp, t_hbm, t_net: seconds at that batch, or at the largest one.
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
    Raises ExploreError for sizes below 1, more devices than experts, an alpha that is not above 0,
    and a step whose FLOPs or bytes are not finite or below 0.
    """
    for name, sizes in (("devices", devices), ("kv", kv), ("batches", batches)):
        whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in sizes)
        if not len(sizes) or not whole:
            raise ExploreError(f"{name}={sizes!r:.60}: expected whole numbers of at least 1")
    if max(devices) > experts.experts:
        raise ExploreError(
            f"devices={max(devices)}: {experts.experts} experts are on that many devices at most"
        )
    if not 0 < alpha < float("inf"):
        raise ExploreError(f"alpha={alpha!r:.60}: expected a number above 0")
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
    # The last entry is twice the largest batch: what it adds is what every further sequence adds.
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
    """What a function of the step gave, as numbers for each batch."""
    result = np.asarray(values, dtype=np.float64)
    if result.shape not in ((), batch.shape):
        raise ExploreError(
            f"{name} gave the shape {result.shape} for batches of the shape {batch.shape}"
        )
    if not np.isfinite(result).all() or (result < 0).any():
        raise ExploreError(f"{name} gave {result.min():g}: expected numbers of at least 0")
    return np.broadcast_to(result, batch.shape)


def _further(values: Array) -> float:
    """What one sequence more adds beyond the largest batch."""
    return float(values[-1] - values[-2])


def _over(flop: float, size: float) -> float:
    return flop / size if size else float("inf")


def _slowest(seconds: dict[str, float]) -> str:
    return max(seconds, key=lambda name: seconds[name])
