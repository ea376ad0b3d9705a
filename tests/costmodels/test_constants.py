"""Constants of kernels, recomputed from the measurements in this repository.

Each ratio is a measured time over the one that rooftrace expects for the same call; where a share
limits that time, the share that the measurements ask for is the shipped one over the ratio.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from rooftrace.costmodels.kernels import Knobs, load_knobs
from rooftrace.hardware import load_chip
from tests.costmodels.script_support import loaded

KERNELS = Path(__file__).parents[2] / "benchmarks" / "kernels"
FILE = "h100-2026-11-26.jsonl.gz"


@pytest.fixture(scope="module")
def compare() -> Any:
    """The module `compare` of the benchmark, which prices measured calls."""
    with loaded(KERNELS / "compare.py", "kernels_compare") as module:
        yield module


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("selective_scan", "scan"),
        ("selective_state_update", "state update"),
        ("mamba_chunk_scan_combined", "ssd"),
    ],
)
@pytest.mark.parametrize("knobs", ["typical-eager", "typical-compiled"])
def test_shares_of_recurrent_kernels_are_those_of_the_calls_on_h100(
    compare: Any, kernel: str, kind: str, knobs: str
) -> None:
    _, *rows = compare.load(KERNELS / FILE)
    calls = [row for row in rows if row["kernel"] == kernel and "ms" in row]
    ratios = [compare.compared(row, "h100-sxm").ratio for row in calls]
    assert len(ratios) >= 15
    share = load_knobs(knobs).share(kind).compute
    recomputed = share / statistics.median(ratios)
    assert recomputed == pytest.approx(share, rel=0.12)


@pytest.mark.parametrize(
    ("name", "file"), [("h100-sxm", FILE), ("h200-sxm", "h200-2026-11-26.jsonl.gz")]
)
def test_large_copies_move_the_share_of_the_bandwidth_that_hopper_sustains(
    compare: Any, name: str, file: str
) -> None:
    _, *rows = compare.load(KERNELS / file)
    copy = next(row for row in rows if row["kernel"] == "copy")
    chip = load_chip(name)
    [(_, _, microseconds)] = copy["kernels"]
    measured = copy["bytes"] / (microseconds * 1e-6) / chip.memory_bandwidth.value
    _, expected = Knobs.typical(chip, compiled=True).reached("elementwise")
    assert expected == pytest.approx(measured, rel=0.05)


# -- their sources ---------------------------------------------------------------------------------

FITTED = Path(__file__).parents[2] / "rooftrace" / "costmodels" / "kernels" / "fitted"
FILES = sorted((*FITTED.glob("typical-*.toml"), *FITTED.glob("generations/*.toml")))
ABOUT = {"chip", "note", "spread"}
"""Entries of [source] that are of no single constant."""


def constants(data: dict[str, Any]) -> Iterator[tuple[str, set[str]]]:
    """Each constant of a file, and the entries of [source] that may say where it is from."""
    every = {"from", "generation"}
    for name, value in data.items():
        if isinstance(value, float):
            yield name, {name, *every}
    for name in data.get("tiling", {}):
        yield f"tiling.{name}", every
    for name in data.get("engines", {}):
        yield f"engines.{name}", {"engines"}
    for name in data.get("products", {}):
        form, _, library = name.partition(" ")
        yield f"products.{name}", {"narrow"} if form == "narrow" else {"products", library}
    for name, numbers in data.get("share", {}).items():
        kind = name.partition(" ")[0].replace("conv,", "odd_channels")
        for number in numbers:
            of = ({"layout", "layout_fp32"} & {number} and {"layout"}) or {number, name, kind}
            yield f"share.{name}.{number}", of | every


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_constant_names_its_data_and_every_source_is_of_one(path: Path) -> None:
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    source = data.pop("source")
    used: set[str] = set()
    for name, entries in constants(data):
        assert entries & set(source), f"{path.name}: {name} has no source"
        used |= entries & set(source)
    assert set(source) - used <= ABOUT
    assert all(len(source[name]) > 20 for name in used)
