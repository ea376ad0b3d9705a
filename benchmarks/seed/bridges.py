"""From a number of the earlier report to ours, one named step after another.

A step is computed, not asserted: from its formula with one term mended, from a trace with one
thing changed, or from the kernels that its formula leaves out.  What no step explains is the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import formulas
from formulas import Dimensions
from traced import ABSORBED, CHIP, Point, Priced, priced

REASONS: Mapping[str, str] = {
    "expansion": "The code that was traced keeps latents in its cache, and multiplies all of them "
    "with the weights of keys and values at every step. The report counted the bytes of that "
    "cache, with the FLOPs of one that holds keys and values. FLOPs: 2 B L r h (d_n + d_v) a "
    "layer. Bytes: the trace without, and with `absorb-latent`.",
    "latents": "With `absorb-latent` attention runs on the latents themselves, as its bytes say: "
    "2 h (2 r + d_r) FLOP for a position and token in place of 2 h (d_n + d_r + d_v).",
    "own position": "A new token attends to itself too: L + 1 positions, not L.",
    "no products": "The report counts a FLOP for each copied number of the embedding, and one for "
    "each score; softmax, norms and sums elsewhere were 0. Ours are those that kernels compute.",
    "attention scaled": "The grid scales the FLOPs and the weights of attention by "
    "s max(s, q): s, q are the factors on the hidden size and on the rank. The trace has the "
    "products of that config.",
    "rows of the table": "The report reads all of the embedding's table at every step. Read are "
    "the rows that are looked up.",
    "experts reached": "Exactly E (1 - (1 - k/E)^T) by uniform routing; the report has a Poisson "
    "number for each expert.",
    "cache": "Of the cache the report moves B (L + 1) rows. A `cat` reads L rows and writes L + 1, "
    "and attention reads L + 1; in place, one is written and L + 1 are read. A prompt writes its "
    "rows, and they are read.",
    "other weights": "Norms outside of attention, which the report has not.",
    "scores": "The score matrix passes through HBM more than twice, at the width that the code "
    "has; the difference of the trace with attention as products and as one kernel.",
    "wide values": "What the code keeps at more than a byte: fp32 in norms, softmax, routers and "
    "sums over experts, int64 and bool in indices.",
    "norms and sums": "Norms, residual sums and rotations at one byte: the report has 0.",
    "experts: copies": "Gathering tokens for experts, weighting and summing what comes back, at "
    "one byte: the report has the inputs and outputs of products only.",
    "experts: products": "Gate and up are one product here, and read their input once.",
    "attention at its edges": "What every product and copy of attention reads and writes, at one "
    "byte. The report has 5 hidden states for a token of a prompt and 7 in decode.",
    "other activations": "Of dense layers, head, embedding and loss, at one byte.",
    "gradients": "Gradients of weights, written by backward: the report has twice the bytes of "
    "forward.",
    "optimizer": "The optimizer's step: weights, gradients, states and what it writes between.",
    "slow shares": "The report puts 2 to 30 % of each product on units with 0.35 of the peak.",
    "rows of experts": "The report takes one efficiency at the mean of rows, of routed "
    "experts and shared ones. The times of both add up.",
    "rows of attention": "Products of a score matrix have a row for each query and head, not "
    "one for each token.",
    "rows of backward": "The gradient of a weight is a product with as many rows as the weight, "
    "not one for each token.",
    "two bytes": "A product with a cache of two bytes runs at the rate of bf16.",
    "fp32 products": "The code multiplies in fp32 for its router: on the vector engine.",
    "vector work": "Elementwise work at 0.35 of the peak.",
    "peak": "1978.9 in place of 1979 TFLOP/s.",
    "mask": "Whole blocks above the diagonal are skipped, or are not there.",
}


LEAST = 0.005
"""Steps below this share of their number are not told."""

HOLDS: Mapping[str, tuple[str, ...]] = {
    "weights": ("attention scaled", "rows of the table", "experts reached", "other weights"),
    "cache": ("cache",),
    "gradients, optimizer": ("gradients", "optimizer"),
}
"""Which steps of the bytes are of which content; all others are activations and temporaries."""


def percent(share: float) -> str:
    """A share with its sign; large ones as multiples."""
    return f"{share:+.1%}" if abs(share) < 10 else f"{share:+.3g} times"


@dataclass(frozen=True, slots=True)
class Bridge:
    """theirs + the sum of steps + rest = ours."""

    theirs: float
    ours: float
    steps: Mapping[str, float]

    @property
    def rest(self) -> float:
        """What no step explains."""
        return self.ours - self.theirs - sum(self.steps.values())

    @property
    def ratio(self) -> float:
        """Ours over theirs."""
        return self.ours / self.theirs if self.theirs else float("inf")

    def told(self) -> str:
        """The reasons with their shares, in words."""
        return ", ".join(f"{name} {percent(share)}" for name, share in self.reasons())

    def reasons(self, least: float = LEAST) -> list[tuple[str, float]]:
        """The steps of at least this share of theirs, as shares, largest first."""
        if not self.theirs:
            return []
        shares = [(name, size / self.theirs) for name, size in self.steps.items()]
        return sorted((s for s in shares if abs(s[1]) >= least), key=lambda s: -abs(s[1]))


@dataclass(frozen=True, slots=True)
class Compared:
    """A point in one execution: theirs, ours, and the way from one to the other."""

    theirs: formulas.Published
    ours: Priced
    flops: Bridge
    bytes: Bridge
    compute: Bridge  # seconds

    def of_content(self) -> dict[str, Bridge]:
        """The bytes by what they hold."""
        theirs, ours, steps = self.theirs, self.ours, self.bytes.steps
        inside = {name for names in HOLDS.values() for name in names}
        states = ours.narrow["optimizer"] + ours.wide["optimizer"]
        others = [name for name in steps if name not in inside]
        sizes = {
            "weights": (theirs.bytes("weights"), ours.role("weights"), HOLDS["weights"]),
            "cache": (theirs.bytes("kv"), ours.role("kv"), HOLDS["cache"]),
            "activations, temporaries": (
                theirs.bytes("activations") + theirs.bytes("temporary"),
                ours.others - states,
                others,
            ),
            "gradients, optimizer": (
                0.0,
                ours.role("gradients") + ours.optimizer,
                HOLDS["gradients, optimizer"],
            ),
        }
        return {
            name: Bridge(before, after, {step: steps[step] for step in names})
            for name, (before, after, names) in sizes.items()
        }

    @property
    def t(self) -> float:
        """Seconds as they took them: the larger of both totals."""
        return max(self.ours.estimate.times.t_comp, self.ours.estimate.times.t_hbm)

    @property
    def regime(self) -> str:
        """Which total that is."""
        times = self.ours.estimate.times
        return "compute" if times.t_comp > times.t_hbm else "hbm"


def _tokens(point: Point) -> int:
    return point.batch * (1 if point.phase == "decode" else point.length)


@dataclass(frozen=True, slots=True)
class _Terms:
    """FLOP of single terms of a point, forward."""

    point: Point
    m: Dimensions

    @property
    def tokens(self) -> int:
        return _tokens(self.point)

    @property
    def expansion(self) -> float:
        """Expanding what was cached before."""
        if self.point.phase != "decode":
            return 0.0
        m = self.m
        cached = 2.0 * self.point.batch * self.point.length * m.kv_rank
        return m.layers * cached * m.heads * (m.nope + m.value)

    def scores(self, positions: int, latent: bool = False) -> float:
        """Products with and of the scores, when each token attends to so many positions."""
        m = self.m
        width = 2 * m.kv_rank + m.rope if latent else m.nope + m.rope + m.value
        return float(m.layers * self.tokens * m.heads * positions * 2 * width)

    @property
    def new_rows(self) -> float:
        """Keys and values of the new tokens."""
        m = self.m
        return m.layers * 2.0 * self.tokens * m.kv_rank * m.heads * (m.nope + m.value)

    @property
    def no_products(self) -> float:
        """One for each score, and one for each number of the embedding."""
        m = self.m
        return float(self.tokens * (m.layers * m.heads * self.point.length + m.hidden))

    @property
    def routed(self) -> float:
        """Products of routed experts."""
        m = self.m
        return m.moe_layers * 6.0 * self.tokens * m.hidden * m.expert_width * m.top_k

    @property
    def router(self) -> float:
        """Products of routers."""
        return self.m.moe_layers * 2.0 * self.tokens * self.m.hidden * self.m.experts

    @property
    def reached(self) -> float:
        """Expected distinct experts of a layer, exactly."""
        m = self.m
        return m.experts * (1 - (1 - m.top_k / m.experts) ** self.tokens)


@dataclass(frozen=True, slots=True)
class _Sides:
    """A point in one execution: what is compared."""

    point: Point
    execution: str
    latent: bool  # whether latents are absorbed
    theirs: formulas.Published
    mended: formulas.Published  # their formula at the dimensions of the config that was traced
    ours: Priced
    terms: _Terms

    @property
    def positions(self) -> int:
        """To how many a token attends."""
        return self.point.length + (1 if self.point.phase == "decode" else 0)


def compare(point: Point, execution: str, *, latent: bool = False) -> Compared:
    """Both sides of a point, and the steps between them; ours with latents absorbed if asked."""
    m = point.true_dimensions
    sizes = (point.phase, point.batch, point.length, execution)
    sides = _Sides(
        point,
        execution,
        latent,
        formulas.step(point.dimensions, *sizes),
        formulas.step(m, *sizes),
        priced(point, execution, **({"rewrites": ABSORBED} if latent else {})),
        _Terms(point, m),
    )
    return Compared(sides.theirs, sides.ours, _flops(sides), _bytes(sides), _compute(sides))


def _flops(sides: _Sides) -> Bridge:
    terms, theirs, estimate = sides.terms, sides.theirs, sides.ours.estimate
    length = sides.point.length
    vector = estimate.flops - estimate.flops_matrix
    steps = {
        "attention scaled": sides.mended.flops - theirs.flops,
        "expansion": 0.0 if sides.latent else terms.expansion,
        "own position": terms.scores(sides.positions) - terms.scores(length),
        "latents": terms.scores(sides.positions, sides.latent) - terms.scores(sides.positions),
        "no products": vector - theirs.flop_factor * terms.no_products,
    }
    return Bridge(theirs.flops, estimate.flops, steps)


@lru_cache(maxsize=4)
def _without(point: Point, execution: str) -> tuple[Priced, Priced]:
    """The trace with attention as one kernel, and then on latents."""
    flash = priced(point, execution, attention="flash")
    if point.phase != "decode":
        return flash, flash
    return flash, priced(point, execution, attention="flash", rewrites=ABSORBED)


def _bytes(sides: _Sides) -> Bridge:
    m, ours, theirs, mended = sides.terms.m, sides.ours, sides.theirs, sides.mended
    factors, double = formulas.EXECUTIONS[sides.execution], theirs.byte_factor
    flash, plain = _without(sides.point, sides.execution)
    before = {name: double * entry.activations for name, entry in mended.entries.items()}
    others = ("dense", "head", "embedding", "loss")
    expert = 3 * m.moe_layers * m.hidden * m.expert_width / factors.moe
    poisson = formulas.distinct_experts(m, sides.terms.tokens)
    steps = {
        "attention scaled": mended.bytes("weights") - theirs.bytes("weights"),
        "rows of the table": ours.bytes["embedding", "weights"]
        - double * mended.entries["embedding"].weights,
        "experts reached": double * expert * (sides.terms.reached - poisson),
        "other weights": ours.bytes["norm", "weights"]
        - double * m.layers * (m.q_rank + m.kv_rank) / factors.attention,
        "cache": _cache(sides) - theirs.bytes("kv"),
        "scores": (0.0 if sides.latent else ours.others - flash.others) - theirs.bytes("temporary"),
        "expansion": 0.0 if sides.latent else flash.others - plain.others,
        "wide values": sum(n for family, n in plain.wide.items() if family != "optimizer"),
        "norms and sums": sum(plain.narrow[f] for f in ("norm", "elementwise", "rotary")),
        "experts: products": plain.products["moe"] - before["experts"],
        "experts: copies": plain.narrow["moe"] - plain.products["moe"],
        "attention at its edges": plain.narrow["attention"] - before["attention"],
        "other activations": sum(plain.narrow[family] for family in others)
        - sum(before[name] for name in ("ffn", "head", "embedding")),
        "gradients": ours.role("gradients"),
        "optimizer": ours.optimizer,
    }
    return Bridge(theirs.bytes(), ours.estimate.bytes_hbm, steps)


def _cache(sides: _Sides) -> float:
    """Bytes of the cache, by the passes over it."""
    m, length = sides.terms.m, sides.point.length
    row = m.layers * sides.point.batch * (m.kv_rank + m.rope) * m.cache_bytes
    if sides.point.phase == "training":
        return 0.0
    if sides.point.phase == "prefill":
        return float(row * 2 * length)
    if sides.execution == "naive":
        return float(row * (length + 2 * (length + 1)))
    return float(row * (1 + length + 1))


def _expansion(terms: _Terms, seconds: Callable[[float, float], float]) -> float:
    """Seconds of projecting cached and new rows at once, less those of the new ones alone."""
    if not terms.expansion:
        return 0.0
    rows = terms.tokens * (terms.point.length + 1)
    return seconds(terms.expansion + terms.new_rows, rows) - seconds(terms.new_rows, terms.tokens)


def _backward(sides: _Sides, each: float) -> float:
    """FLOP at the peak that gradients of weights take less, by their own rows: a third of all."""
    if sides.point.phase != "training":
        return 0.0
    terms, forward = sides.terms, sides.mended.flops / sides.mended.flop_factor
    others = forward - terms.routed - terms.scores(sides.point.length) - terms.no_products
    return sum(
        flop * (1 - 1 / min(1.0, rows / formulas.SATURATION))
        for flop, rows in ((terms.routed, each), (others, terms.tokens))
    )


def _compute(sides: _Sides) -> Bridge:
    """Seconds of computing.  One product takes FLOP / (peak x eta), eta by its own rows."""
    terms, theirs, ours = sides.terms, sides.theirs, sides.ours
    factor, tokens, peak = theirs.flop_factor, terms.tokens, formulas.PEAK
    length = sides.point.length

    def seconds(flop: float, rows: float) -> float:
        return factor * flop / (peak * min(1.0, rows / formulas.SATURATION))

    def whole(side: formulas.Published) -> float:
        return sum(seconds(entry.flops, entry.rows) for entry in side.entries.values())

    experts = sides.mended.entries["experts"]
    each = tokens * terms.m.top_k / terms.reached
    apart = seconds(terms.routed, each)
    apart += seconds(experts.flops - terms.routed, tokens)
    rows = 1 if sides.point.phase == "decode" else length
    counted = seconds(terms.scores(length), tokens)
    products = seconds(
        terms.scores(sides.positions, sides.latent), terms.m.heads if sides.latent else rows
    )
    spent = ours.seconds
    two_bytes = spent["matmul", "bf16"]
    ratio = CHIP.peak("matrix", "bf16") / CHIP.peak("matrix", "fp8")
    fast = spent["matmul", "fp8"] + two_bytes * ratio
    skipped = ours.estimate.plan.total.flops(counts=("masked",))
    steps = {
        "slow shares": whole(theirs) - theirs.realizable / peak,
        "attention scaled": whole(sides.mended) - whole(theirs),
        "rows of experts": apart - seconds(experts.flops, experts.rows),
        "no products": -seconds(terms.no_products, tokens),
        "rows of attention": 0.0 if sides.latent else products - counted,
        "latents": products - counted if sides.latent else 0.0,
        "rows of backward": _backward(sides, each) / peak,
        "mask": -skipped / peak,
        "expansion": 0.0 if sides.latent else _expansion(terms, seconds),
        "two bytes": two_bytes * (1 - ratio),
        "fp32 products": spent["matmul", "fp32"] - seconds(terms.router, tokens),
        "vector work": spent["vector", "fp32"],
        "peak": fast * (1 - CHIP.peak("matrix", "fp8") / peak),
    }
    return Bridge(theirs.realizable / peak, ours.estimate.times.t_comp, steps)
