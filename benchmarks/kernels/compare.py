"""Measured kernels beside what rooftrace prices for the same sizes.

    python benchmarks/kernels/compare.py benchmarks/kernels/h100-2026-11-26.jsonl

Each case is traced as a module (modules.py) and priced with typical knobs.  `ratio` is measured
over expected, `bound` measured over the time at the datasheet's peaks.  The execution is that of
the library which ran: FlashAttention 2 and 3, cuDNN, and `eager` for the kernel that reads a mask
tensor.  Device time only: no launch of a graph, no host.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from modules import module_of

import rooftrace as rt

LIBRARIES = {"flash": "flash2", "varlen": "flash2", "cudnn": "cudnn", "fa3": "flash3"}
CHIPS = {"H100": "h100-sxm", "H200": "h200-sxm"}
KEPT = ("group", "kernel", "ms", "low", "high", "calls", "how", "kernels", "took", "error")
DECIDING = 0.1
"""Share by which an expected time may be off before its case is listed as far off."""


def execution_of(row: dict[str, Any]) -> Any:
    """How the program ran that was measured."""
    if row["kernel"] == "efficient" or (row["kernel"] == "default" and row["group"] != "baseline"):
        return rt.execution_model("eager")
    library = LIBRARIES.get(row["kernel"])
    more = {"attention_library": library} if library else {}
    return rt.execution_model("efficient", **more)


def sizes_of(row: dict[str, Any]) -> dict[str, Any]:
    """What says which case a row is of."""
    return {name: value for name, value in row.items() if name not in KEPT}


def expected(row: dict[str, Any], chip: str) -> tuple[float, float, int]:
    """Milliseconds expected and at the peaks, and kernels, of the kernels of a case."""
    module, given = module_of(row["kernel"], sizes_of(row))
    graph = rt.trace(module, *given)
    priced = rt.estimate(graph, chip, execution_of(row))
    seconds = sum(one.timing.t_device for one in priced.rows)
    return seconds * 1e3, priced.t_bound * 1e3, priced.kernels


def text_of(row: dict[str, Any]) -> str:
    """The sizes of a case in few words."""
    sizes = sizes_of(row)
    if "mask" in sizes:
        heads = f"{sizes['heads']}/{sizes['kv_heads']}x{sizes['width']}"
        more = f" {sizes['scores']}" if "scores" in sizes else ""
        return f"{sizes['batch']}x{sizes['queries']}/{sizes['keys']} {heads} {sizes['mask']}{more}"
    return " ".join(f"{name}={value}" for name, value in sizes.items())


def compared(rows: list[dict[str, Any]], chip: str) -> list[tuple[dict[str, Any], float]]:
    """Prints a line for each row; rows with measured over expected."""
    print("| kernel | sizes | measured ms | expected | ratio | bound | kernels |")
    print("|---|---|---:|---:|---:|---:|---:|")
    found = []
    for row in rows:
        launched = sum(often for _, often, _ in row.get("kernels", []))
        try:
            ms, bound, kernels = expected(row, chip)
        except (KeyError, rt.RooftraceError, NotImplementedError) as error:
            reason = "no module" if isinstance(error, KeyError) else type(error).__name__
            print(f"| {row['kernel']} | {text_of(row)} | {row['ms']:.4f} | {reason} | | | {launched} |")
            continue
        ratio = row["ms"] / ms
        found.append((row, ratio))
        print(
            f"| {row['kernel']} | {text_of(row)} | {row['ms']:.4f} | {ms:.4f} | {ratio:.2f} "
            f"| {row['ms'] / bound:.2f} | {launched} / {kernels} |"
        )
    return found


def kind_of(row: dict[str, Any]) -> str:
    """A kernel, and what its mask is."""
    mask = str(row.get("mask", "")).partition(":")[0]
    step = " decode" if row.get("queries") == 1 else ""
    return f"{row['kernel']}{step} {mask} {row.get('scores', '')}".strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", help="kernels, comma-separated")
    given = parser.parse_args()
    head, *rows = [json.loads(line) for line in given.file.read_text().splitlines()]
    chip = next(name for word, name in CHIPS.items() if word in head["device"])
    print(f"{head['device']}, {head['date']}, driver {head['driver']}, {head['versions']}\n")
    rows = [row for row in rows if "ms" in row]
    if given.only:
        rows = [row for row in rows if row["kernel"] in given.only.split(",")]
    by_kind = defaultdict(list)
    for row, ratio in compared(rows, chip):
        by_kind[kind_of(row)].append(ratio)
    print("\n| of | cases | median ratio | least | most |\n|---|---:|---:|---:|---:|")
    for kind, ratios in by_kind.items():
        middle = statistics.median(ratios)
        print(f"| {kind} | {len(ratios)} | {middle:.2f} | {min(ratios):.2f} | {max(ratios):.2f} |")


if __name__ == "__main__":
    main()
