"""The records of a census: matrix products by their sizes, and how they fill tiles."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from rooftrace._plain import Plain
from rooftrace._shown import Shown, short, some
from rooftrace.hardware.units import format_flops

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, slots=True, kw_only=True)
class Product(Plain):
    """Equal products C[M, N] = A[M, K] B[K, N] of a step, cut into equal tiles."""

    operation: str  # "matmul", or "convolution": as the product that it implies
    kind: str  # what the rule calls the kernel: mm, bmm, grouped mm, conv, rnn ...
    rows: float | None  # M; the mean where the groups of a call differ; None: not known
    columns: int | None  # N
    inner: float | None  # K; the mean where the groups of a call differ
    # Products of this size in a call: of a batch, of the groups that got rows, of a convolution's
    # groups; real ones, of which a complex product is four.
    batch: float | None
    precision: str  # what it computes in
    calls: int
    flops: int  # FLOP, without those that backward computes again
    flops_recompute: int
    modules: tuple[str, ...]  # whose code calls it, indices starred
    parts: tuple[str, ...]  # forward, backward, recompute
    # Seconds of the kernels with what is fused to them; several products of a kernel share it by
    # their seconds at the peak.
    seconds: float
    share: float  # of t_serial
    tile: tuple[int, int] | None  # M and N of what one block computes
    split: int | None  # blocks that share one tile's K
    tile_efficiency: float | None  # the share of what whole tiles compute that C has
    wave_efficiency: float | None  # the share of the SMs that has a block, over whole waves
    seconds_wasted: float | None  # that full tiles in full waves, fed at once, would save
    odd: tuple[str, ...]  # which of M, N, K are rows in memory that do not keep the alignment
    aligned: tuple[float, int, float] | None  # M, N, K with those up to the next size that does
    aligned_flops: int  # FLOP more at these sizes
    aligned_seconds: float | None  # seconds more at these sizes, by the kernel model; below 0: less

    @property
    def shape(self) -> tuple[float, int, float] | None:
        """M, N, K; None where they are not all known."""
        if self.rows is None or self.columns is None or self.inner is None:
            return None
        return self.rows, self.columns, self.inner

    @property
    def flops_wasted(self) -> int | None:
        """FLOP that whole tiles compute beyond those of C; None where no tile is known."""
        if self.tile_efficiency is None:
            return None
        done = self.flops + self.flops_recompute
        return round(done / self.tile_efficiency) - done

    KEYS = "* flops_wasted"


_FIELDS = tuple(each.name for each in fields(Product))


@dataclass(frozen=True, slots=True, kw_only=True)
class Census(Plain, Shown):
    """Every matrix product of a step, most seconds first, and the FLOP of attention kernels.

    flops + flops_attention are the matrix FLOP of the step.
    """

    title: str
    products: tuple[Product, ...]
    flops_attention: int  # of kernels that multiply inside and never write the scores
    calls_attention: int
    seconds_attention: float
    align: int  # bytes that rows in memory should be a multiple of
    expected: bool  # whether seconds are expected ones, by knobs; False where they are bounds
    chip: str
    execution: str
    phase: str

    KEYS = (
        "title phase chip execution align expected flops flops_attention calls_attention "
        "seconds_attention flops_matrix products"
    )

    @property
    def flops(self) -> int:
        """FLOP of all products, without recomputation."""
        return sum(product.flops for product in self.products)

    @property
    def flops_matrix(self) -> int:
        """FLOP in matrix products and convolutions, attention dense: `Estimate.flops_matrix`."""
        return self.flops + self.flops_attention

    @property
    def odd(self) -> tuple[Product, ...]:
        """The products with sizes that do not keep the alignment, most seconds first."""
        return tuple(product for product in self.products if product.odd)

    def to_rows(self) -> list[dict[str, Any]]:
        """One plain dict for each product; lists as text, for tables."""
        return [
            {k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in row.items()}
            for row in (product.to_dict() for product in self.products)
        ]

    def to_frame(self) -> pandas.DataFrame:
        """One row for each product."""
        import pandas

        return pandas.DataFrame.from_records(
            [product.to_dict() for product in self.products],
            columns=[*_FIELDS, "flops_wasted"],
        )

    def __repr__(self) -> str:
        sizes = (" x ".join(map(str, p.shape or ("?",))) for p in self.products)
        return short(
            self, f"{len(self.products)} products, {format_flops(self.flops_matrix)}: {some(sizes)}"
        )
