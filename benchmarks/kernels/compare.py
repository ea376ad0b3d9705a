"""Measured kernels beside what rooftrace prices for the same sizes.

    python benchmarks/kernels/compare.py benchmarks/kernels/h100-2026-11-26.jsonl.gz --only fa3,flex

Each case is traced as a module (modules.py) and priced with typical knobs.  `ratio` is measured
over expected, `bound` measured over the time at the datasheet's peaks.  The execution is that of
the library which ran: FlashAttention 2 and 3, cuDNN, and `eager` where PyTorch chose, or a kernel
that reads a mask tensor.  `by sizes` is measured over what the model of time says of the pairs that
the mask lets through, without a trace (sized.py).  Device time only: no launch of a graph, no host;
both sides have about the same for a kernel that does nothing (3 us).
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modules import module_of
from sized import sized

import rooftrace as rt

LIBRARIES = {
    "flash": "flash2", "varlen": "flash2", "efficient": "flash2", "cudnn": "cudnn", "fa3": "flash3",
}  # fmt: skip
CHIPS = {"H100": "h100-sxm", "H200": "h200-sxm"}
KEPT = ("group", "kernel", "ms", "low", "high", "calls", "how", "kernels", "grids", "took", "error")


@dataclass(frozen=True)
class Compared:
    """A measured case beside its price: milliseconds, and kernels of one call."""

    row: dict[str, Any]
    expected: float
    bound: float
    kernels: int
    sized: float | None

    @property
    def ratio(self) -> float:
        """Measured over expected."""
        return float(self.row["ms"]) / self.expected if self.expected else math.inf

    @property
    def sized_ratio(self) -> float | None:
        """Measured over what sizes alone say."""
        return None if self.sized is None else float(self.row["ms"]) / self.sized

    @property
    def kind(self) -> str:
        """The kernel and what its mask is."""
        mask = str(self.row.get("mask", "")).partition(":")[0]
        step = " decode" if self.row.get("queries") == 1 else ""
        return f"{self.row['kernel']}{step} {mask} {self.row.get('scores', '')}".strip()


def load(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of `measure.py`: the machine, then the cases."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in text.splitlines()]


def sizes_of(row: dict[str, Any]) -> dict[str, Any]:
    """What says which case a row is of."""
    return {name: value for name, value in row.items() if name not in KEPT}


def reads_mask(row: dict[str, Any]) -> bool:
    """Whether the kernel that ran was given the mask as a tensor."""
    plain = row["mask"] in ("none", "causal") and "scores" not in row
    return row["kernel"] == "efficient" or (row["kernel"] in ("default", "cudnn") and not plain)


def compared(row: dict[str, Any], chip: str) -> Compared:
    """A case, priced as the program ran that was measured."""
    sizes, library = sizes_of(row), LIBRARIES.get(row["kernel"])
    eager = row["group"] in ("rows", "operators", "conv")
    plain = eager or row["kernel"] in ("efficient", "default")
    preset = "eager" if plain else "efficient"
    execution = rt.tools.execution_model(preset, attention_library=library)
    module, given = module_of(row["kernel"], sizes)
    tf32 = row["group"] == "conv"  # as PyTorch sets it: cuDNN alone
    priced = rt.estimate(rt.trace(module, *given), chip=chip, execution=execution, tf32=tf32)
    seconds = sum(one.timing.t_device for one in priced.rows)
    by_sizes = None
    if "mask" in row and priced.knobs is not None:
        by_sizes = sized(sizes, priced.chip, library or "cudnn", reads_mask(row), priced.knobs)
    return Compared(row, seconds * 1e3, priced.t_bound * 1e3, priced.kernels, by_sizes)


def text_of(row: dict[str, Any]) -> str:
    """The sizes of a case in few words."""
    sizes = sizes_of(row)
    if "mask" in sizes:
        heads = f"{sizes['heads']}/{sizes['kv_heads']}x{sizes['width']}"
        more = f" {sizes['scores']}" if "scores" in sizes else ""
        return f"{sizes['batch']}x{sizes['queries']}/{sizes['keys']} {heads} {sizes['mask']}{more}"
    return " ".join(f"{name}={value}" for name, value in sizes.items())


def table(rows: Sequence[dict[str, Any]], chip: str) -> list[Compared]:
    """Prints a line for each row; those that could be priced."""
    print("| kernel | sizes | measured ms | expected | ratio | by sizes | bound | kernels |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    found = []
    for row in rows:
        launched = sum(often for _, often, _ in row["kernels"])
        begun = f"| {row['kernel']} | {text_of(row)} | {row['ms']:.4f} |"
        try:
            one = compared(row, chip)
        except (KeyError, AttributeError, ValueError, TypeError, RuntimeError) as error:
            print(f"{begun} {type(error).__name__} | | | | {launched} |")
            continue
        found.append(one)
        by_sizes = "" if one.sized_ratio is None else f"{one.sized_ratio:.2f}"
        print(
            f"{begun} {one.expected:.4f} | {one.ratio:.2f} | {by_sizes} "
            f"| {row['ms'] / (one.bound or math.inf):.2f} | {launched} / {one.kernels} |"
        )
    return found


def summary(found: Sequence[Compared]) -> None:
    """Prints the spread of the ratios by kind."""
    by_kind = defaultdict(list)
    for one in found:
        by_kind[one.kind].append(one)
    print("\n| of | cases | ratio | least | most | by sizes | least | most |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for kind, cases in by_kind.items():
        sized_ones = [one.sized_ratio for one in cases if one.sized_ratio is not None]
        print(f"| {kind} | {len(cases)} {spread([c.ratio for c in cases])} {spread(sized_ones)} |")


def spread(ratios: Sequence[float]) -> str:
    """Cells of the median, the least and the most."""
    if not ratios:
        return "| | |"
    numbers = (statistics.median(ratios), min(ratios), max(ratios))
    return " ".join(f"| {number:.2f}" for number in numbers)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", help="kernels, comma-separated")
    given = parser.parse_args()
    head, *rows = load(given.file)
    chip = next(name for word, name in CHIPS.items() if word in head["device"])
    print(f"{head['device']}, {head['date']}, driver {head['driver']}, {head['versions']}\n")
    rows = [row for row in rows if "ms" in row]
    if given.only:
        rows = [row for row in rows if row["kernel"] in given.only.split(",")]
    summary(table(rows, chip))


if __name__ == "__main__":
    main()
