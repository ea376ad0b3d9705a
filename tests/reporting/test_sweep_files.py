"""Tables of sweeps as files: whole or not there, and gone on with after a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.errors import RequestError
from rooftrace.reporting.commands import sweeps

pytestmark = pytest.mark.quick


def net() -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        return model, torch.empty(8, 64)


@pytest.fixture(scope="module")
def form() -> rt.types.Form:
    return rt.tools.form(*net(), over={"0.0": range(2, 201)})


def evaluations(monkeypatch: pytest.MonkeyPatch, stop_at: int | None = None) -> list[int]:
    """Counts the parts that are evaluated; the one at `stop_at` is interrupted."""
    seen: list[int] = []
    evaluated = sweeps.evaluated

    def counted(*args: Any) -> Any:
        seen.append(len(args[1]))
        if len(seen) == stop_at:
            raise KeyboardInterrupt
        return evaluated(*args)

    monkeypatch.setattr(sweeps, "evaluated", counted)
    return seen


@pytest.fixture(autouse=True)
def kept(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where parts are kept: not those of another test."""
    folder = tmp_path_factory.mktemp("kept")
    monkeypatch.setenv("ROOFTRACE_CACHE", str(folder))
    return folder


def test_a_stopped_sweep_goes_on_where_it_was(
    form: rt.types.Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeps, "_AT_ONCE", 50)
    out, asked = tmp_path / "sweep.csv", {"over": {"0.0": range(2, 201)}, "chip": ["l4", "a100"]}
    with monkeypatch.context() as patch:
        evaluations(patch, stop_at=3)
        with pytest.raises(KeyboardInterrupt):
            rt.sweep(form, out=out, **asked)
    assert not out.exists()
    seen = evaluations(monkeypatch)
    result = rt.sweep(form, out=out, **asked)
    assert seen == [50, 49]  # of 50, 50, 50 and 49
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.csv"]
    whole = rt.sweep(form, **asked)
    assert result.frame().equals(whole.frame())


@pytest.mark.parametrize(
    "other",
    [
        {"over": {"0.0": [2, 3, 5, 200]}},  # as many levels, and the same ends
        {"chip": ["l4"]},
        {"execution": "eager"},
        {"dtype": "bf16"},
    ],
    ids=str,
)
def test_parts_of_another_sweep_are_not_taken(
    form: rt.types.Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    out, asked = tmp_path / "sweep.csv", {"over": {"0.0": [2, 4, 6, 200]}, "chip": ["h200-sxm"]}
    with monkeypatch.context() as patch:
        patch.setattr(sweeps, "write_sweep", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rt.sweep(form, out=out, **asked)
    assert (
        rt.sweep(form, out=out, **{**asked, **other})
        .frame()
        .equals(rt.sweep(form, **{**asked, **other}).frame())
    )


def test_a_part_that_is_cut_off_is_made_again(
    form: rt.types.Form, tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, asked = tmp_path / "sweep.csv", {"over": {"0.0": range(2, 9)}}
    with monkeypatch.context() as patch:
        patch.setattr(sweeps, "write_sweep", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rt.sweep(form, out=out, **asked)
    (part,) = kept.glob("*.npz")
    part.write_bytes(part.read_bytes()[:100])
    assert rt.sweep(form, out=out, **asked).frame().equals(rt.sweep(form, **asked).frame())


def test_parquet_and_csv_hold_the_frame(form: rt.types.Form, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    asked: dict[str, Any] = {"over": {"0.0": range(2, 40)}, "chip": ["l4", "h200-sxm"]}
    frame = rt.sweep(form, out=tmp_path / "a.parquet", **asked).frame()
    pandas.testing.assert_frame_equal(
        pandas.read_parquet(tmp_path / "a.parquet"), frame, check_categorical=False
    )
    rt.sweep(form, out=tmp_path / "a.csv", **asked)
    table = pandas.read_csv(tmp_path / "a.csv")
    assert list(table.columns) == list(frame.columns)
    assert (table["flops"] == frame["flops"]).all() and (table["t_est"] == frame["t_est"]).all()


def test_another_kind_of_file_is_refused(form: rt.types.Form, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"a\.txt.*\.parquet or \.csv"):
        rt.sweep(form, over={"0.0": [3]}, out=tmp_path / "a.txt")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("values", "levels"),
    [
        ("1..4", [1, 2, 3, 4]),
        ("1..10:4", [1, 5, 9]),
        ("256..2048:x2", [256, 512, 1024, 2048]),
        ("4,1,2,2", [1, 2, 4]),
        ("1_000", [1000]),
        ((3, 5), [3, 4, 5]),
        ([9, 7], [7, 9]),
        (6, [6]),
    ],
)
def test_values_of_a_size(values: Any, levels: list[int]) -> None:
    assert list(sweeps.level_values("batch", values)) == levels


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("9..1", "the range is empty"),
        ("0..4", "sizes are at least 1"),
        ("1..x", "expected numbers"),
        ("1..64:x1", "expected numbers"),
        ("1..64:0", "expected numbers"),
        ("", "expected numbers"),
        ([], "the range is empty"),
    ],
)
def test_values_that_are_none(values: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        sweeps.level_values("batch", values)


def test_a_size_that_stands_twice_is_refused() -> None:
    with pytest.raises(RequestError, match="leave it out"):
        rt.sweep("gpt2", phase="prefill", over={"seq": [4, 5]}, seq=9)


def test_a_size_that_the_model_does_not_take_says_so() -> None:
    pytest.importorskip("transformers")
    with pytest.raises((RequestError, rt.types.TraceError)) as error:
        rt.sweep("gpt2", phase="prefill", over={"seq": [100, 5000]})
    assert "5,000" in str(error.value) or "5000" in str(error.value)
