"""The formulas of an earlier report generator, so that its tables can be computed again.

They are here with their mistakes (docs/roofline-pitfalls.md): what they give is compared with what
it published (tests/test_earlier_report.py), and then with traces.  FLOP, byte, second.  One byte an
element, unless a field says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

PEAK, BANDWIDTH, LINK = 1979e12, 4800e9, 900e9  # FLOP/s and byte/s of an H200, FP8 dense
SATURATION, SCALAR = 64, 0.35  # rows for the full rate; rate of what no tensor core does
ON_TENSOR_CORES = {"attention": 0.95, "embedding": 0.70, "experts": 0.98, "ffn": 0.98, "head": 0.98}


@dataclass(frozen=True, slots=True)
class Dimensions:
    """DeepSeek-V3, with the two factors by which its attention was scaled in the grid."""

    hidden: int = 7168
    layers: int = 61
    dense_layers: int = 3
    heads: int = 128
    q_rank: int = 1536
    kv_rank: int = 512
    nope: int = 128
    rope: int = 64
    value: int = 128
    vocabulary: int = 129280
    dense_width: int = 18432
    expert_width: int = 2048
    experts: int = 256
    shared: int = 1
    top_k: int = 8
    attention_hidden: int = 7168  # the hidden size of attention, which the grid scales as a whole
    attention: float = 1.0  # factor on FLOPs and weights of attention
    cache: float = 1.0  # factor on elements of the cache
    cache_bytes: int = 1  # of an element

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers

    @property
    def cached(self) -> float:
        """Cached elements of a token in one layer."""
        return (self.kv_rank + self.rope) * self.cache

    @property
    def projection_weights(self) -> int:
        """Weights of the projections of one attention."""
        q, h = self.nope + self.rope, self.heads
        down = self.attention_hidden * (self.q_rank + self.kv_rank + self.rope + h * self.value)
        return down + self.q_rank * h * q + self.kv_rank * h * (self.nope + self.value)


@dataclass(frozen=True, slots=True)
class Factors:
    """What it took of each kind of bytes in one execution."""

    attention: float = 1.0  # weights of attention are divided by these
    dense: float = 1.0
    moe: float = 1.0
    activations: float = 1.0
    elementwise: float = 1.0
    flash: bool = False


EXECUTIONS = {"naive": Factors(), "efficient": Factors(4.0, 4.0, 2.0, 0.5, 0.7, True)}


@dataclass(frozen=True, slots=True)
class Entry:
    """A category of its report: FLOP, rows of its products, HBM bytes by what they hold."""

    flops: float
    rows: float
    weights: float = 0.0
    activations: float = 0.0
    kv: float = 0.0
    temporary: float = 0.0

    @property
    def bytes(self) -> float:
        """All of them."""
        return self.weights + self.activations + self.kv + self.temporary


@dataclass(frozen=True, slots=True)
class Published:
    """A step: its categories, and what follows from their sums."""

    entries: dict[str, Entry]
    flop_factor: int = 1  # 3 in training
    byte_factor: int = 1  # 2 in training
    tokens: int = 1

    @property
    def flops(self) -> float:
        """FLOP."""
        return self.flop_factor * sum(e.flops for e in self.entries.values())

    def bytes(self, kind: str = "bytes") -> float:
        """HBM bytes, all or of one kind."""
        return float(self.byte_factor * sum(getattr(e, kind) for e in self.entries.values()))

    @property
    def realizable(self) -> float:
        """FLOP at the peak that would take as long."""
        total = 0.0
        for name, entry in self.entries.items():
            eta, share = min(1.0, entry.rows / SATURATION), ON_TENSOR_CORES[name]
            total += entry.flops * (share / eta + (1 - share) / SCALAR)
        return self.flop_factor * total

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by what could limit the step."""
        return {"compute": self.realizable / PEAK, "hbm": self.bytes() / BANDWIDTH}

    @property
    def t(self) -> float:
        """The larger of both."""
        return max(self.seconds.values())

    @property
    def regime(self) -> str:
        """Which one that is."""
        return max(self.seconds, key=lambda name: self.seconds[name])

    @property
    def intensity(self) -> float:
        """FLOP for each HBM byte."""
        return self.flops / self.bytes()

    @property
    def mfu(self) -> float:
        """Share of the peak."""
        return self.flops / (PEAK * self.t)


def distinct_experts(model: Dimensions, tokens: int) -> float:
    """Experts that `tokens` reach, by a Poisson number of tokens for each."""
    return model.experts * -math.expm1(-tokens * model.top_k / model.experts)


def step(model: Dimensions, phase: str, batch: int, length: int, execution: str) -> Published:
    """A step of `batch` sequences: `length` is the prompt's, in decode the cache's."""
    m, f = model, EXECUTIONS[execution]
    decode = phase == "decode"
    tokens = batch if decode else batch * length
    per_layer = {
        "attention": _attention(m, f, batch, length, decode),
        "embedding": Entry(
            tokens * m.hidden, tokens, m.vocabulary * m.hidden / f.dense,
            tokens * m.hidden * f.activations,
        ),
        "head": Entry(
            2 * tokens * m.hidden * m.vocabulary, tokens, m.vocabulary * m.hidden / f.dense,
            tokens * (m.hidden + m.vocabulary) * f.activations,
        ),
        "ffn": Entry(
            6 * tokens * m.hidden * m.dense_width * m.dense_layers, tokens,
            3 * m.hidden * m.dense_width * m.dense_layers / f.dense,
            3 * tokens * (m.hidden + m.dense_width) * f.activations * m.dense_layers,
        ),
        "experts": _experts(m, f, tokens),
    }  # fmt: skip
    training = phase == "training"
    return Published(per_layer, 3 if training else 1, 2 if training else 1, tokens)


def _attention(m: Dimensions, f: Factors, batch: int, length: int, decode: bool) -> Entry:
    """Multi-head latent attention in all layers; its activations and cache are those of a dense
    one."""
    tokens = batch if decode else batch * length
    pairs = tokens * length
    core = pairs * m.heads * (2 * (m.nope + m.rope) + 1 + 2 * m.value)
    norms = m.q_rank + m.kv_rank
    scores = batch * m.heads * (1 if f.flash else 2 * length) * (1 if decode else length)
    if f.flash and decode:
        scores = batch * m.heads
    written = (length + 1) * batch if decode else tokens
    return Entry(
        flops=m.layers * (2 * tokens * m.projection_weights + core) * m.attention,
        rows=tokens,
        weights=m.layers * (m.projection_weights + norms) * m.attention / f.attention,
        activations=m.layers * (7 if decode else 5) * tokens * m.hidden * f.activations,
        kv=m.layers * written * m.cached * m.cache_bytes,
        temporary=m.layers * scores * f.elementwise,
    )


def _experts(m: Dimensions, f: Factors, tokens: int) -> Entry:
    """Router, routed and shared experts of all layers."""
    distinct = distinct_experts(m, tokens)
    one = m.hidden * m.expert_width
    routed, shared = 6 * tokens * one * m.top_k, 6 * tokens * one * m.shared
    each = tokens * m.top_k / distinct
    rows = round((routed * each + shared * tokens) / (routed + shared))
    n = m.moe_layers
    return Entry(
        flops=n * (2 * tokens * m.hidden * m.experts + routed + shared),
        rows=rows,
        weights=n * (m.hidden * m.experts + 3 * one * (distinct + m.shared)) / f.moe,
        activations=n
        * f.activations
        * tokens
        * ((m.top_k + m.shared) * 3 * (m.hidden + m.expert_width) + m.hidden + m.experts),
    )


# -- the grid ------------------------------------------------------------------------------------

GRID: dict[str, tuple[float, ...]] = {
    "kv_bytes": (1, 2),
    "top_k": (2, 4, 8),
    "kv_rank": (0.5, 1.0, 1.5),
    "hidden": (0.75, 1.0, 1.25),
    "kv": (2048, 4096, 8192, 16384),
}
"""The factors of the grid and their levels; kv_rank and hidden are factors on the dimension."""


def at(top_k: float, kv_rank: float, hidden: float, kv_bytes: float = 1) -> Dimensions:
    """The dimensions at one point of the grid, as it scaled them."""
    base = Dimensions()
    return replace(
        base,
        hidden=round(base.hidden * hidden),
        dense_width=round(base.dense_width * hidden),
        expert_width=round(base.expert_width * hidden),
        top_k=int(top_k),
        attention=hidden * max(hidden, kv_rank),
        cache=kv_rank,
        cache_bytes=int(kv_bytes),
    )


# -- whether decode can be limited by computing --------------------------------------------------


@dataclass(frozen=True, slots=True)
class Explored:
    """A row of its exploration; no batch: why none is large enough."""

    per_kv_byte: float  # FLOP
    per_link_byte: float  # FLOP
    batch: int | None


def explore(
    parallel: int, kv: int, batches: Sequence[int] = tuple(2**n for n in range(15))
) -> Explored:
    """Its exploration at one number of devices and one length of the cache."""
    m, share = Dimensions(), 0.9
    one = m.hidden * m.expert_width
    core = m.heads * kv * (2 * (m.nope + m.rope) + 2 * m.value + 1)
    flops = m.layers * (2 * m.projection_weights + core) + m.moe_layers * (
        2 * m.hidden * m.experts + m.top_k / parallel * 6 * one
    )
    cache = m.layers * (kv + 1) * m.cached
    link = 2 * m.top_k * m.hidden
    result = Explored(flops / cache, flops / link, None)
    if flops / cache < share * PEAK / BANDWIDTH or flops / link < share * PEAK / LINK:
        return result
    group = math.ceil(m.experts / parallel)
    for batch in batches:
        distinct = group * -math.expm1(-batch * parallel * m.top_k / m.experts)
        weights = m.layers * (m.projection_weights + m.q_rank + m.kv_rank) + m.moe_layers * (
            m.hidden * m.experts + 3 * one * (distinct + m.shared)
        )
        moved = max((weights + batch * cache) / BANDWIDTH, batch * link / LINK)
        if batch * flops / PEAK >= share * moved:
            return replace(result, batch=batch)
    return result
