"""The findings of tests/reporting/planted.py on a GPU: what mending gains, and what is told.

    python benchmarks/planted.py measure planted.jsonl          # on the GPU
    python benchmarks/planted.py compare planted.jsonl h200-sxm

The first line of the file is the machine; each other line has the median milliseconds of 30 steps
of one pair, planted and mended.
"""

from __future__ import annotations

import json
import statistics
import sys
import warnings
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "kernels")]
from tests.reporting.planted import PAIRS  # noqa: E402
from tests.reporting.planted_ways import Way  # noqa: E402


def milliseconds(way: Way) -> float:
    """The median of 30 steps, between events, after 8."""
    step = way.step("cuda")
    for _ in range(8):
        step()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(30)]
    for start, end in pairs:
        start.record()
        step()
        end.record()
    torch.cuda.synchronize()
    return round(statistics.median(start.elapsed_time(end) for start, end in pairs), 4)


def measure(path: Path) -> None:
    """Write a line for each pair."""
    from measure import machine

    lines = [machine()]
    for pair in PAIRS:
        ways = {"planted": pair.planted, "mended": pair.mended}
        lines.append({"name": pair.name, **{name: milliseconds(ways[name]) for name in ways}})
        torch.cuda.empty_cache()
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def compare(path: Path, chip: str) -> None:
    """Print measured and expected milliseconds, and how often as fast the mended one is."""
    from tests.reporting.test_planted import estimated

    rows = {row["name"]: row for row in map(json.loads, path.read_text().splitlines()[1:])}
    print(
        "| finding | measured ms | gain | expected ms | gain | error |\n|---|---|---:|---|---:|---|"
    )
    for pair in (pair for pair in PAIRS if pair.name in rows):
        told = [rows[pair.name][side] for side in ("planted", "mended")]
        made = [estimated(way, chip).t_est * 1e3 for way in (pair.planted, pair.mended)]
        off = ", ".join(f"{ours / ms - 1:+.0%}" for ours, ms in zip(made, told, strict=True))
        both = [f"{a:.2f}, {b:.2f} | {a / b:.2f}" for a, b in (told, made)]
        print(f"| {pair.name} | {both[0]} | {both[1]} | {off} |")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    verb, file = sys.argv[1], Path(sys.argv[2])
    measure(file) if verb == "measure" else compare(file, sys.argv[3])
