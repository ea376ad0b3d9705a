"""The exploration of the earlier report beside ours: by its algorithm mended, and by traces."""

from __future__ import annotations

from collections.abc import Iterator

import formulas
from traced import ABSORBED, CHIP, Point, repriced

import rooftrace as rt
from rooftrace.costmodels.fusion.executions import WeightResidency
from rooftrace.studies.explaining import DecodeStep, Rates, RoutedExperts, explore
from rooftrace.studies.explaining.critical_batch import Explored

DEVICES, KV = (1, 2, 4, 8, 16, 32, 64), (2048, 4096, 8192, 16384)
FAR = 50e9  # byte/s in one direction of a 400 Gb/s network card
M = formulas.Dimensions()
ROUTED = RoutedExperts(
    layers=M.moe_layers,
    experts=M.experts,
    top_k=M.top_k,
    hidden=M.hidden,
    width=M.expert_width,
)


def mended() -> DecodeStep:
    """Their algorithm (a compressed cache, and FLOPs of an expanded one) with all terms."""
    others = M.moe_layers * (M.hidden * M.experts + 3 * M.hidden * M.expert_width * M.shared)
    others += 3 * M.hidden * M.dense_width * M.dense_layers + M.hidden * M.vocabulary
    weights = M.layers * M.projection_weights + others
    each = M.layers * M.heads * 2 * (M.nope + M.rope + M.value)
    return DecodeStep(
        flops=lambda batch, kv: batch * (2 * weights + each * kv),
        kv_bytes=lambda batch, kv: batch * (kv + 1) * M.layers * M.cached,
        weight_bytes=weights,
    )


def traced() -> DecodeStep:
    """What traces say with absorbed latents: two lengths of the cache tell both terms.

    Every weight is read once.  What kernels pass on to each other is left out on both sides.
    """
    execution = rt.tools.execution_model(
        "seed-efficient", weight_residency=WeightResidency(), rewrites=ABSORBED
    )
    batch, lengths = 8, (2048, 4096)
    sides = [
        rt.estimate(repriced(Point("decode", batch, length)), CHIP, execution) for length in lengths
    ]
    apart = lengths[1] - lengths[0]
    flops = [(side.flops_matrix - _routed_flops(batch)) / batch for side in sides]
    cache = [side.bytes.kv / batch for side in sides]
    each, rows = (flops[1] - flops[0]) / apart, (cache[1] - cache[0]) / apart
    weights = sides[0].bytes.weights - _routed_bytes(batch)
    return DecodeStep(
        flops=lambda batch, kv: batch * (flops[0] + each * (kv - lengths[0])),
        kv_bytes=lambda batch, kv: batch * (cache[0] + rows * (kv - lengths[0])),
        weight_bytes=weights,
    )


def _routed_flops(batch: int) -> float:
    return M.moe_layers * 6.0 * batch * M.top_k * M.hidden * M.expert_width


def _routed_bytes(batch: int) -> float:
    reached = M.experts * (1 - (1 - M.top_k / M.experts) ** batch)
    return M.moe_layers * 3.0 * M.hidden * M.expert_width * reached


def routed_elsewhere(devices: int, kv: int) -> float:
    """FLOP per cache byte that they left out by dividing the routed work by the devices."""
    left = M.moe_layers * 6.0 * M.hidden * M.expert_width * M.top_k * (1 - 1 / devices)
    return left / (M.layers * (kv + 1) * M.cached)


def rows() -> Iterator[tuple[formulas.Explored, Explored, Explored, Explored]]:
    """Theirs; theirs mended; traced; traced with a slow link: by devices and cache length."""
    near = Rates(formulas.PEAK, formulas.BANDWIDTH, formulas.LINK)
    far = Rates(formulas.PEAK, formulas.BANDWIDTH, FAR)
    step = traced()
    columns = [
        explore(of, ROUTED, rates, devices=DEVICES, kv=KV)
        for of, rates in ((mended(), near), (step, near), (step, far))
    ]
    sizes = ((devices, kv) for devices in DEVICES for kv in KV)
    for (devices, kv), *ours in zip(sizes, *columns, strict=True):
        yield formulas.explore(devices, kv), *ours  # type: ignore[misc]
