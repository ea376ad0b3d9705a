"""Ours beside the tables of an earlier report generator, with the reasons of every difference.

    python benchmarks/seed/page.py > docs/earlier-report.md
    make earlier

The grid of 432 points is read from grid.csv (see grid.py); all else is traced now, in a minute.
Ends with an error where more than 0.5 % of a number has no reason.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import explored
import formulas
from bridges import LEAST, REASONS, Bridge, Compared, compare
from traced import Point

from rooftrace.studies.sensitivity import Factorial, factorial, grid_of

HERE = Path(__file__).parent
WAYS = (("naive", False), ("efficient", False), ("efficient", True))
RIDGE = formulas.PEAK / formulas.BANDWIDTH
LIMITS = {"hbm": "HBM", "compute": "computing"}
HEAD = """# Beside an earlier report

An earlier report generator wrote a report on DeepSeek-V3 (671 B parameters) from formulas: one byte
for each number, batch 8, prompt or cache of 255 tokens, an H200 at 1979 TFLOP/s and 4800 GB/s. Its
figures are in `benchmarks/seed/published/`; `benchmarks/seed/formulas.py` has its formulas, which
give all of these figures again, to the digit
([test](../tests/test_earlier_report.py)). This page sets the same quantities beside them, from
traces of the model (`rooftrace/tracer/targets/configs/deepseek-v3.json`) in fp8 under the presets
with its factors, `seed-naive` and `seed-efficient`. `make earlier` writes it.

Those factors are a comparison, not a recommendation: see
[what is wrong with them](roofline-pitfalls.md). *absorbed* is `seed-efficient` with the rewrite
[`absorb-latent`](serving.md): attention runs on the compressed cache whose bytes the report counts.

Times are compared as the report took them: the larger of the totals for computing and for HBM.
*In turn* is what the preset says: one kernel after another, with gaps.

## Why they differ

Each step from its number to ours is computed; the shares are of its number. Steps below 0.5 % are
left out in the tables, but counted. What no step explains of one of our numbers, at most:
{rest}.

| reason | what it is |
|---|---|"""


class Worst:
    """The largest share of a number that no step explains."""

    def __init__(self) -> None:
        self.share = 0.0

    def see(self, side: Compared) -> Compared:
        """A comparison, which may be the worst."""
        bridges = (side.flops, side.bytes, side.compute)
        self.share = max(self.share, *(abs(b.rest / b.ours) for b in bridges))
        return side


def why(side: Compared) -> str:
    """The reasons of the differences of a row."""
    parts = []
    bridges: list[tuple[str, Bridge]] = [("FLOP", side.flops), ("bytes", side.bytes)]
    if "compute" in (side.regime, side.theirs.regime):
        bridges.append(("computing", side.compute))
    for name, bridge in bridges:
        if bridge.reasons():
            parts.append(f"{name} x{bridge.ratio:.3g}: {bridge.told()}")
    return "; ".join(parts) or "within 0.5 %"


def cells(side: Compared) -> list[str]:
    """Intensity, time, TFLOP/s and regime: theirs, ours, ratio."""
    theirs, estimate = side.theirs, side.ours.estimate
    intensity = estimate.flops / estimate.bytes_hbm
    rate, their_rate = estimate.flops / side.t / 1e12, theirs.flops / theirs.t / 1e12
    limits = LIMITS[theirs.regime], LIMITS[side.regime]
    regime = limits[0] if limits[0] == limits[1] else " -> ".join(limits)
    return [
        f"{theirs.intensity:.4g}", f"{intensity:.4g}", f"{intensity / theirs.intensity:.3g}",
        f"{theirs.t * 1e3:.5g}", f"{side.t * 1e3:.5g}", f"{side.t / theirs.t:.3g}",
        f"{their_rate:.4g}", f"{rate:.4g}", f"{estimate.t_est * 1e3:.5g}", regime, why(side),
    ]  # fmt: skip


COLUMNS = ("FLOP/byte theirs", "ours", "ratio", "ms theirs", "ours", "ratio", "TFLOP/s theirs",
           "ours", "in turn ms", "limit", "why")  # fmt: skip


def table(first: Sequence[str], columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; the columns after the first are numbers, but for "why" and "limit"."""
    names = [*first, *columns]
    words = {"why", "limit", "phase", "execution", "holds", "limiter"}
    print(f"| {' | '.join(names)} |")
    print("|" + "|".join("---" if name in words else "---:" for name in names) + "|")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def title_of(execution: str, latent: bool) -> str:
    """A way of comparing, in a word."""
    return "absorbed" if latent else execution


def phases(worst: Worst) -> Iterator[list[str]]:
    """The rows of the phases."""
    for phase in ("training", "prefill", "decode"):
        for execution, latent in WAYS if phase == "decode" else WAYS[:2]:
            side = worst.see(compare(Point(phase, 8, 255), execution, latent=latent))
            yield [phase, title_of(execution, latent), *cells(side)]


def computing(worst: Worst) -> Iterator[list[str]]:
    """The work in units of the peak, TFLOP."""
    for phase in ("training", "prefill", "decode"):
        for execution, latent in WAYS if phase == "decode" else WAYS[:2]:
            side = worst.see(compare(Point(phase, 8, 255), execution, latent=latent))
            bridge, unit = side.compute, formulas.PEAK / 1e12
            yield [phase, title_of(execution, latent), f"{bridge.theirs * unit:.5g}",
                   f"{bridge.ours * unit:.5g}", f"{bridge.ratio:.3g}", bridge.told()]  # fmt: skip


def by_content(worst: Worst) -> Iterator[list[str]]:
    """Bytes by what they hold, in GB."""
    for phase in ("training", "prefill", "decode"):
        for execution, latent in WAYS if phase == "decode" else WAYS[:2]:
            side = worst.see(compare(Point(phase, 8, 255), execution, latent=latent))
            for name, bridge in side.of_content().items():
                if not bridge.theirs and not bridge.ours:
                    continue
                if abs(bridge.rest) > LEAST * max(bridge.theirs, bridge.ours):
                    sys.exit(f"{phase}, {execution}, {name}: {bridge.rest:.3g} has no reason")
                why = bridge.told() or "not in the report"
                yield [phase, title_of(execution, latent), name, f"{bridge.theirs / 1e9:.5g}",
                       f"{bridge.ours / 1e9:.5g}",
                       f"{bridge.ratio:.3g}" if bridge.theirs else "",
                       why if bridge.reasons() or not bridge.theirs else "within 0.5 %",
                       ]  # fmt: skip


def sweep(points: Sequence[Point], execution: str, latent: bool, worst: Worst) -> None:
    """A table of one execution over sizes."""
    name = "batch" if points[0].phase == "decode" else "prompt"
    sizes = [p.batch if p.phase == "decode" else p.length for p in points]
    sides: list[Compared] = []

    def rows() -> Iterator[list[str]]:
        for size, point in zip(sizes, points, strict=True):
            sides.append(worst.see(compare(point, execution, latent=latent)))
            yield [str(size), *cells(sides[-1])]

    print(f"\n### {name.capitalize()}, {title_of(execution, latent)}\n")
    table([name], COLUMNS, rows())
    theirs = crossing(sizes, [side.theirs.intensity for side in sides])
    ours = crossing(
        sizes, [side.ours.estimate.flops / side.ours.estimate.bytes_hbm for side in sides]
    )
    what = f"{name.capitalize()} at which the intensity reaches the ridge of {RIDGE:.1f} FLOP/byte"
    print(f"\n{what}: theirs {theirs}, ours {ours}.")


def crossing(sizes: Sequence[int], intensities: Sequence[float]) -> str:
    """The first size at the ridge, in a straight line between those tried."""
    before = None
    for size, intensity in zip(sizes, intensities, strict=True):
        if intensity >= RIDGE:
            if before is None:
                return f"{size} or less"
            low, under = before
            part = (RIDGE - under) / (intensity - under)
            return f"{low + part * (size - low):.1f}"
        before = size, intensity
    return f"none to {sizes[-1]}"


def grid() -> list[dict[str, str]]:
    """The rows of grid.csv."""
    with (HERE / "grid.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def effects(rows: Sequence[dict[str, str]], execution: str, response: str) -> Factorial:
    """The effects on seconds over the points of one execution."""
    chosen = [row for row in rows if row["execution"] == execution]
    return factorial(*grid_of(chosen, tuple(formulas.GRID), response))


def show_grid(worst: Worst) -> None:
    """How far the 432 points are apart, the published ones, and the effects."""
    rows = grid()
    worst.share = max(worst.share, *(float(row["largest_rest"]) for row in rows))
    print("\nOur time over theirs, and what limits it, over the points of each execution:\n")
    spans = []
    for name in ("naive", "efficient", "absorbed"):
        chosen = [row for row in rows if row["execution"] == name]
        ratios = sorted(float(row["s"]) / float(row["their_s"]) for row in chosen)
        close = sum(abs(ratio - 1) <= LEAST for ratio in ratios)
        bound = sum(row["regime"] == "compute" for row in chosen)
        spans.append([name, str(len(ratios)), f"{ratios[0]:.3g}", f"{ratios[len(ratios) // 2]:.3g}",
                      f"{ratios[-1]:.3g}", str(close), str(bound)])  # fmt: skip
    table(["execution"], ["points", "least", "median", "largest", "within 0.5 %", "by computing"],
          spans)  # fmt: skip
    print("\n### The published points\n")
    table(["execution", *formulas.GRID], ["FLOP/byte theirs", "ours", "ms theirs", "ours", "ratio",
          "limit", "why"], published_points(rows))  # fmt: skip
    print("\n### Main effects\n")
    print("Largest over least median of the time over the levels, less one, as the report has it; "
          "and the share of\nthe variance ([sensitivity](sensitivity.md)).\n")  # fmt: skip
    theirs = effects(rows, "efficient", "their_s")
    sides = [theirs, *(effects(rows, name, "s") for name in ("efficient", "absorbed"))]
    names = ["theirs", "as the code runs", "absorbed"]
    columns = [f"{name}{what}" for name in names for what in ("", ", share")]
    ranked = ([effect.factor, *effect_cells(sides, effect.factor)] for effect in theirs.main)
    table(["factor"], columns, ranked)


def effect_cells(sides: Iterable[Factorial], factor: str) -> Iterator[str]:
    """Spread and share of a factor, of each side."""
    for side in sides:
        effect = side.of(factor)
        yield f"{effect.spread or 0:.1%}"
        yield f"{effect.share:.1%}"


REASON_COLUMNS = (("flop", "FLOP"), ("byte", "bytes"), ("compute", "computing"))


def published_points(rows: Sequence[dict[str, str]]) -> Iterator[list[str]]:
    """The points that the report shows, and the same ones with absorbed latents."""
    at = {tuple(float(row[name]) for name in formulas.GRID): {} for row in rows}
    for row in rows:
        at[tuple(float(row[name]) for name in formulas.GRID)][row["execution"]] = row
    with (HERE / "published" / "sensitivity.csv").open(encoding="utf-8") as file:
        shown = list(csv.DictReader(file))
    for point in shown:
        key = tuple(float(point[name]) for name in formulas.GRID)
        names = ["naive"] if point["execution"] == "naive" else ["efficient", "absorbed"]
        for name in names:
            row = at[key][name]
            yield [
                name, *(f"{value:g}" for value in key), point["ai"], f"{float(row['ai']):.4g}",
                point["t_ms"], f"{1e3 * float(row['s']):.4g}",
                f"{1e3 * float(row['s']) / float(point['t_ms']):.3g}", LIMITS[row["regime"]],
                "; ".join(
                    f"{word} x{float(row[of + '_ratio']):.3g}: {row[of + '_reasons']}"
                    for of, word in REASON_COLUMNS[: 3 if row["regime"] == "compute" else 2]
                    if row[of + "_reasons"]
                ),
            ]  # fmt: skip


def exploration() -> Iterator[list[str]]:
    """Theirs, and what each mended term makes of it."""
    for theirs, mended, traced, far in explored.rows():
        whole = theirs.per_kv_byte + explored.routed_elsewhere(mended.devices, mended.kv)
        yield [
            str(mended.devices), str(mended.kv),
            *(f"{theirs.per_kv_byte:.1f}", f"{whole:.1f}", f"{mended.flop_per_kv_byte:.1f}"),
            f"{traced.flop_per_kv_byte:.1f}",
            *(f"{theirs.per_link_byte:,.0f}", f"{mended.flop_per_link_byte:,.0f}"),
            f"{traced.flop_per_link_byte:,.0f}",
            *(str(theirs.batch or "-"), *map(least, (mended, traced, far))),
        ]  # fmt: skip


def least(cell: explored.Explored) -> str:
    """The least batch, or what stands in its way."""
    return str(cell.batch) if cell.batch else f"- {cell.limiter}"


EXPLORED = (
    "FLOP per cache byte: theirs", "+ routed work of all tokens", "+ other layers", "absorbed",
    "FLOP per link byte: theirs", "of all layers", "absorbed",
    "least batch: theirs", "mended", "absorbed", "absorbed, 50 GB/s",
)  # fmt: skip
TAIL = """
Least batch of one device at which computing takes 0.9 of the slower of HBM and link; each device
brings its own batch, and has its share of the experts. The report divides the routed work by the
devices, though each brings its own tokens; leaves out shared experts, dense layers and the head;
and counts the link's bytes of one layer, at one device too. *Mended* has all of these terms, with
its algorithm for attention ([critical batch](sensitivity.md#when-computing-limits-decode)), at its
link of 900 GB/s. *Absorbed* has FLOPs, weights and cache from two traces: then every cell has a
batch. At 50 GB/s, a network card for each device, no batch helps against the link in {stuck} of the
{cells} cells of two devices and more."""


def main() -> None:
    """Print the page; the head comes last, when the largest rest is known."""
    import contextlib
    import io

    worst, body = Worst(), io.StringIO()
    with contextlib.redirect_stdout(body):
        for reason, text in REASONS.items():
            print(f"| {reason} | {text} |")
        print("\n## Phases\n")
        table(["phase", "execution"], COLUMNS, phases(worst))
        print("\nTokens per second and MFU are in the ratio of the times and of TFLOP/s. All "
              "computing, in TFLOP at the peak\nthat would take as long:\n")  # fmt: skip
        table(["phase", "execution"], ["theirs", "ours", "ratio", "why"], computing(worst))
        print("\n## Bytes by what they hold\n\nGB of 1e9 bytes.\n")
        table(["phase", "execution", "holds"], ["theirs", "ours", "ratio", "why"],
              by_content(worst))  # fmt: skip
        print("\n## Decode over the batch\n\nThe cache holds 255 tokens.")
        for execution, latent in WAYS:
            batches = [Point("decode", 2**n, 255) for n in range(8)]
            sweep(batches, execution, latent, worst)
        print("\n## Prefill over the prompt\n\nBatch 8.")
        lengths = [*(2**n for n in range(6, 16)), 163840]
        for execution, latent in WAYS[:2]:
            sweep([Point("prefill", 8, n) for n in lengths], execution, latent, worst)
        print("\n## The grid of 432 points")
        show_grid(worst)
        print("\n## When decode is limited by computing\n")
        cells_explored = list(exploration())
        table(["devices", "cache"], EXPLORED, cells_explored)
        several = [row[-1] for row in cells_explored if row[0] != "1"]
        print(TAIL.format(stuck=several.count("- network"), cells=len(several)))
    print(HEAD.format(rest=f"{worst.share:.2%}"))
    print(body.getvalue(), end="")
    if worst.share > LEAST:
        sys.exit(f"{worst.share:.2%} of a number has no reason")


if __name__ == "__main__":
    main()
