"""Formulas of an earlier report generator: they give the figures that it published, to the digit.

So that what benchmarks/seed sets beside traces is its numbers, and not our reading of them.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rooftrace.studies.sensitivity import factorial

FOLDER = Path(__file__).parents[1] / "benchmarks" / "seed"
PHASES = ("training", "prefill", "decode")
KINDS = ("weights", "activations", "kv", "temporary")


@pytest.fixture(scope="module")
def formulas() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("formulas", FOLDER / "formulas.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["formulas"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["formulas"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(("decode", 8, 255), marks=pytest.mark.heavy),
        ("decode", 8, 4096, 2, 4, 0.5, 1.25),
        pytest.param(("prefill", 2, 64), marks=pytest.mark.heavy),
        ("training", 2, 64),
    ],
    ids=str,
)
def test_every_step_from_its_numbers_to_those_of_a_trace_has_a_reason(
    formulas: ModuleType, sizes: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    for name in ("bridges", "traced"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    bridges = importlib.import_module("bridges")
    point = importlib.import_module("traced").Point(*sizes)
    for execution, latent in (("naive", False), ("efficient", False), ("efficient", True)):
        if latent and sizes[0] != "decode":
            continue
        side = bridges.compare(point, execution, latent=latent)
        for bridge in (side.flops, side.bytes, side.compute, *side.of_content().values()):
            assert abs(bridge.rest) <= 0.005 * max(bridge.ours, bridge.theirs)


def published(name: str) -> list[dict[str, str]]:
    with (FOLDER / "published" / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def size(count: float) -> str:
    """Bytes as the report writes them: steps of 1024 with the names of steps of 1000."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1024:
            return f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TB"


@pytest.mark.parametrize(
    ("table", "phase"), [("decode_batch", "decode"), ("prefill_seq", "prefill")]
)
def test_the_sweeps(formulas: ModuleType, table: str, phase: str) -> None:
    for row in published(table):
        batch, length = int(row.get("batch", 8)), int(row.get("seq", 255))
        for name in formulas.EXECUTIONS:
            step = formulas.step(formulas.Dimensions(), phase, batch, length, name)
            assert f"{step.intensity:.3e}" == row[f"ai_{name}"]
            assert f"{step.t * 1e3:.3f}" == row[f"t_ms_{name}"]
            assert f"{step.flops / step.t / 1e12:.2f}" == row[f"tflops_{name}"]
            assert step.regime == row.get(f"regime_{name}", step.regime)


def test_the_phases(formulas: ModuleType) -> None:
    for row in published("kpi"):
        step = formulas.step(formulas.Dimensions(), row["phase"], 8, 255, row["execution"])
        assert f"{step.realizable / 1e12:.2f} TF" == row["realizable"]
        assert size(step.bytes()) == row["bytes"]
        assert f"{step.intensity:.3e}" == row["ai"]
        assert f"{step.mfu:.3e}" == row["mfu"]
        assert f"{step.t * 1e3:.3f}" == row["t_ms"]
        assert f"{step.tokens / step.t:.2f}" == row["tokens_per_s"]
        assert step.regime == row["regime"]


def test_bytes_by_what_they_hold(formulas: ModuleType) -> None:
    shares = {row["phase"]: row for row in published("byte_shares")}
    for row, name in itertools.product(published("bytes"), formulas.EXECUTIONS):
        step = formulas.step(formulas.Dimensions(), row["phase"], 8, 255, name)
        assert size(step.bytes()) == row[f"hbm_{name}"]
        for kind in KINDS:
            assert size(step.bytes(kind)) == row[f"{kind}_{name}"]
            share = f"{100 * step.bytes(kind) / step.bytes():.1f}%"
            assert share == shares[row["phase"]].get(f"{kind}_{name}", share)


def test_categories(formulas: ModuleType) -> None:
    for row in published("categories"):
        intensities = []
        for name in formulas.EXECUTIONS:
            step = formulas.step(formulas.Dimensions(), row["phase"], 8, 255, name)
            entry = step.entries["head" if row["category"] == "other" else row["category"]]
            moved = entry.bytes * step.byte_factor
            intensities.append(entry.flops * step.flop_factor / moved)
            assert size(moved) == row[f"bytes_{name}"]
            assert f"{intensities[-1]:.3e}" == row[f"ai_{name}"]
        naive, efficient = intensities
        assert f"{100 * (efficient / naive - 1):.1f}%" == row["delta"]


def test_the_exploration(formulas: ModuleType) -> None:
    for row in published("exploration"):
        cell = formulas.explore(int(row["ep"]), int(row["kv"]))
        assert f"{cell.per_kv_byte:.1f}" == row["oi_inf"]
        assert f"{cell.per_link_byte:.1f}" == row["oi_net"]
        assert str(cell.batch or "") == row["least_batch"]


def test_the_grid_and_its_effects(formulas: ModuleType) -> None:
    """The effects of its 216 efficient points are our function's spreads of medians."""
    grid = formulas.GRID

    def at(execution: str, kv_bytes: float, top_k: float, rank: float, hidden: float, kv: float):
        model = formulas.at(top_k, rank, hidden, kv_bytes)
        return formulas.step(model, "decode", 8, int(kv), execution)

    for row in published("sensitivity"):
        step = at(row["execution"], *(float(row[name]) for name in grid))
        assert f"{step.intensity:.3e}" == row["ai"]
        assert f"{step.t * 1e3:.3f}" == row["t_ms"]
        assert f"{step.mfu:.3e}" == row["mfu"]
        assert step.regime == row["regime"]
    shape = [len(levels) for levels in grid.values()]
    cells = [at("efficient", *point).t for point in itertools.product(*grid.values())]
    import numpy as np

    effects = factorial(grid, np.reshape(cells, shape))
    for row in published("effects"):
        effect = effects.of(row["factor"])
        median = effect.medians[effect.levels.index(float(row["level"]))]
        assert f"{1e3 * median:.2f}" == row["median_ms"]
        assert effect.spread is not None
        assert f"{100 * effect.spread:.1f}%" == row["effect"]
