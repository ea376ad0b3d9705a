"""The 432 points of the earlier report's grid, and 216 with absorbed latents, as CSV.

    python benchmarks/seed/grid.py > benchmarks/seed/grid.csv

Takes five minutes: 108 configs, each traced once, priced with caches of one byte and of two.
"""

from __future__ import annotations

import csv
import itertools
import sys
from collections.abc import Iterator

import formulas
from bridges import Compared, compare
from traced import Point

BATCH = 8
WAYS = {"naive": ("naive", False), "efficient": ("efficient", False),
        "absorbed": ("efficient", True)}  # fmt: skip
"""What is compared, by the name in the file: their execution, and whether latents are absorbed."""
COLUMNS = (
    *("execution", *formulas.GRID),
    *("their_ai", "their_s", "their_mfu", "their_regime", "ai", "s", "mfu", "regime", "in_turn_s"),
    *(f"{of}_{what}" for of in ("flop", "byte", "compute") for what in ("ratio", "reasons")),
    "largest_rest",
)


def mfu(side: Compared) -> float:
    """Ours as they define it: all FLOPs over what the peak does in the larger of both totals."""
    return side.ours.estimate.flops / (formulas.PEAK * side.t)


def rows() -> Iterator[tuple[object, ...]]:
    """Each point, in all ways; those that share a trace follow each other."""
    g = formulas.GRID
    for k, rank, hidden, kv in itertools.product(g["top_k"], g["kv_rank"], g["hidden"], g["kv"]):
        for size, (name, (execution, latent)) in itertools.product(g["kv_bytes"], WAYS.items()):
            point = Point("decode", BATCH, int(kv), int(size), int(k), rank, hidden)
            side = compare(point, execution, latent=latent)
            theirs, estimate = side.theirs, side.ours.estimate
            bridges = (side.flops, side.bytes, side.compute)
            yield (
                *(name, int(size), int(k), rank, hidden, int(kv)),
                *(f"{theirs.intensity:.6g}", f"{theirs.t:.6g}", f"{theirs.mfu:.6g}"),
                theirs.regime,
                *(f"{estimate.flops / estimate.bytes_hbm:.6g}", f"{side.t:.6g}"),
                *(f"{mfu(side):.6g}", side.regime, f"{estimate.t_est:.6g}"),
                *(cell for b in bridges for cell in (f"{b.ratio:.6g}", b.told())),
                f"{max(abs(b.rest / b.ours) for b in bridges):.1e}",
            )


def main() -> None:
    """Write the file to stdout."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows():
        writer.writerow(row)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
