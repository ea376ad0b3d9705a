"""Published peaks of memory beside ours.

    python benchmarks/accuracy/memory.py [--every N] [--points FILE.csv]

published/liger.csv: the most that PyTorch had allocated in calls of single operators, from the
benchmark data of Liger-Kernel (BSD-2, linkedin/Liger-Kernel, benchmark/data): its baselines of
PyTorch and transformers.

published/torchtune.csv: the most that was active in steps of torchtune's recipe for full
fine-tuning on one device (BSD-3, README.md, "Optimization flags").
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import finetuning
import operators
from points import Point, write_points

import rooftrace as rt

PUBLISHED = Path(__file__).parent / "published"
MIB = 2**20
CHIPS = {
    "NVIDIA A100-SXM4-80GB": "a100-sxm-80",
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H100 PCIe": "h100-sxm",  # the same generation: what a workspace takes
    "NVIDIA B200": "b200-sxm",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
}


@dataclass(frozen=True)
class Peak:
    """A published peak, and ours in three ways; bytes."""

    group: str
    label: str
    measured: float
    tensors: float  # the tensors alone
    allocated: float  # in the allocator's blocks, with workspaces
    least: float  # without workspaces that a library may do without


def sizes_of(text: str) -> dict[str, Any]:
    """ "M=2048 dtype=bf16" as a dict."""
    pairs = (pair.split("=") for pair in text.split())
    return {name: int(value) if re.fullmatch(r"-?\d+", value) else value for name, value in pairs}


def liger(every: int) -> Iterator[Peak]:
    """Every n-th row of the operators."""
    with (PUBLISHED / "liger.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows[::every]:
        made = operators.made(row["kernel"], sizes_of(row["sizes"]), row["mode"])
        graph = rt.trace(made.step, *made.arguments)
        estimate = rt.estimate(graph, chip=CHIPS[row["gpu"]], execution="eager")
        reserved = estimate.reserved
        left = made.beside + made.workspaces * int(estimate.chip.blas_workspace.value)
        label = f"{row['kernel']} {row['mode']} {row['sizes']} {row['gpu']}"
        yield Peak(
            row["kernel"],
            label,
            float(row["mib"]) * MIB,
            reserved.tensors + made.beside,
            reserved.allocated + left,
            reserved.allocated_least + left,
        )


def torchtune() -> Iterator[Peak]:
    """Steps of fine-tuning; of the compiled ones the whole step is taken as compiled."""
    with (PUBLISHED / "torchtune.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    made: tuple[tuple[Any, ...], Any] | None = None
    for row in rows:
        flags = [bool(int(row[name])) for name in ("chunked", "checkpoint")]
        key = (int(row["batch"]), int(row["seq"]), *flags)
        if made is None or made[0] != key:
            made = key, rt.trace(*finetuning.made(*key))
        execution = "compiled" if int(row["compile"]) else "eager"
        reserved = rt.estimate(made[1], chip=CHIPS[row["gpu"]], execution=execution).reserved
        named = [name for name in ("chunked", "checkpoint") if int(row[name])]
        yield Peak(
            f"torchtune, {', '.join([execution, *named])}",
            f"{row['model']} batch={row['batch']} seq={row['seq']} {row['gpu']}",
            float(row["active_gib"]) * 2**30,
            reserved.tensors,
            reserved.allocated,
            reserved.allocated_least,
        )


def table(peaks: Sequence[Peak]) -> str:
    """Errors by operator, and of all."""
    by_group: dict[str, list[Peak]] = defaultdict(list)
    for peak in peaks:
        by_group[peak.group].append(peak)
    lines = [
        "| | rows | mean | median | p90 | bias | tensors alone | worst |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    groups = [*by_group.items(), *([("all", list(peaks))] if len(by_group) > 1 else [])]
    for name, found in groups:
        errors = [peak.allocated / peak.measured - 1 for peak in found]
        sizes = sorted(map(abs, errors))
        alone = statistics.mean(abs(peak.tensors / peak.measured - 1) for peak in found)
        worst = max(found, key=lambda peak: abs(peak.allocated / peak.measured - 1))
        lines.append(
            f"| {name} | {len(found)} | {statistics.mean(sizes):.2%} | "
            f"{statistics.median(sizes):.2%} | {sizes[int(0.9 * (len(sizes) - 1))]:.2%} | "
            f"{statistics.mean(errors):+.2%} | {alone:.2%} | "
            f"{worst.label.split(' ', 1)[1]} {worst.allocated / worst.measured - 1:+.1%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--every", type=int, default=1, help="every n-th row only")
    parser.add_argument("--points", type=Path, help="write every prediction there, as CSV")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    tell: Callable[[str], None] = lambda text: print(text, file=sys.stderr)  # noqa: E731
    tell("operators")
    peaks = sorted(liger(given.every), key=lambda peak: peak.group)
    print(table(peaks))
    tell("fine-tuning")
    steps = list(torchtune())
    print("\n" + table(steps))
    peaks += steps
    if given.points:
        write_points(
            given.points, (Point(p.label, p.allocated, p.measured, p.group) for p in peaks)
        )


if __name__ == "__main__":
    main()
