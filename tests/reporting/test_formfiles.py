"""Forms as files, and sweeps that were stopped: nothing is lost, and nothing wrong is read."""

from __future__ import annotations

import builtins
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.errors import RequestError
from rooftrace.graph import GraphFileError
from rooftrace.reporting.commands import sweeps
from rooftrace.studies.forms import Conditions
from rooftrace.studies.sweeps import evaluated, points_of

OVER = {"batch": range(1, 65), "0.1": range(8, 65, 8)}


class Small(nn.Module):
    """Two products with a norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + hidden


@pytest.fixture(scope="module")
def form() -> rt.types.Form:
    return rt.tools.form(Small(), torch.empty(2, 8, 32), over=OVER)


@pytest.fixture(scope="module")
def saved(form: rt.types.Form, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return form.save(tmp_path_factory.mktemp("forms") / "small.json")


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["form.json", "form.json.gz"])
def test_a_form_comes_back_from_its_file(form: rt.types.Form, tmp_path: Path, name: str) -> None:
    known = rt.types.Form.load(form.save(tmp_path / name))
    assert known.names == form.names and known.where() == form.where()
    for batch, length in ((1, 8), (13, 64), (64, 40)):
        sizes = {"batch": batch, "0.1": length}
        assert known.graph(**sizes) == form.graph(**sizes)
    again = known.save(tmp_path / f"again-{name}")
    assert rt.types.Form.load(again).where() == form.where()


class Masked(nn.Module):
    """A causal mask of infinities, and a NaN for what is beyond all numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = x @ x.transpose(1, 2)
        later = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -math.inf).softmax(-1)
        return torch.where(scores > math.inf, math.nan, scores) @ x


def test_a_form_with_infinities_and_nans_is_proven_and_comes_back(tmp_path: Path) -> None:
    over = {"batch": range(2, 33), "0.1": range(8, 65, 8)}
    form = rt.tools.form(Masked(), torch.empty(2, 8, 32), over=over)
    assert len(form.regimes) == 1  # a NaN is equal to itself
    known = rt.types.Form.load(form.save(tmp_path / "masked.json"))
    json.loads((tmp_path / "masked.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    sizes = {"batch": 13, "0.1": 40}
    assert known.graph(**sizes) == form.graph(**sizes)
    before, after = (rt.sweep(one, over=over).frame() for one in (form, known))
    assert before.equals(after)


def test_lines_of_a_sweep_are_plain_data_with_all_their_digits(form: rt.types.Form) -> None:
    made = rt.sweep(form, over={"batch": (1, 64), "0.1": 8})
    lines = json.loads(json.dumps(made.to_dict()["lines"], allow_nan=False))
    frame = made.frame()
    for place, line in enumerate(lines):
        assert line == {name: frame[name].iloc[place] for name in line}
    assert lines[0]["t_bound"] < 1e-6  # of which ten decimals would be few


def test_a_loaded_form_answers_only_where_it_is_proven(saved: Path) -> None:
    known = rt.types.Form.load(saved)
    with pytest.raises(RequestError, match="nothing is proven there"):
        known.graph(**{"batch": 65, "0.1": 8})
    with pytest.raises(RequestError, match="size 'bacht'"):
        known.graph(**{"bacht": 1, "0.1": 8})
    with pytest.raises(RequestError, match=r"'0\.1' has no values"):
        rt.sweep(known, over={"batch": (1, 4)})
    with pytest.raises(RequestError, match="size 'kv'"):
        rt.sweep(known, over={"batch": (1, 4), "0.1": 8, "kv": 5})


def test_a_saved_form_is_swept_without_torch(
    saved: Path, form: rt.types.Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = rt.sweep(form, over=OVER).columns
    real: Callable[..., Any] = builtins.__import__

    def refusing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} is not here")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refusing)
    told = rt.sweep(saved, over=OVER).columns
    for name, column in expected.items():
        np.testing.assert_array_equal(told[name], column, err_msg=name)


def test_any_damage_of_a_file_is_one_clear_error(saved: Path, tmp_path: Path) -> None:
    whole, draw = saved.read_bytes(), random.Random(0)
    path = tmp_path / "damaged.json"
    for number in range(150):
        data = bytearray(whole)
        place = draw.randrange(len(data))
        if number % 3 == 0:
            data = data[:place]
        elif number % 3 == 1:
            data[place] ^= 1 << draw.randrange(8)
        else:
            digits = [i for i in range(len(data)) if chr(data[i]).isdigit()]
            place = draw.choice(digits)
            data[place] = ord(draw.choice([d for d in "0123456789" if ord(d) != data[place]]))
        path.write_bytes(data)
        with pytest.raises(GraphFileError, match=r"damaged\.json"):
            rt.types.Form.load(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("schema", "rooftrace.form/99"),
        ("schema", "rooftrace.graphs/1"),
        ("names", ["batch"]),
        ("title", 5),
        ("regimes", {}),
        ("regimes", [[]]),
        ("digest", ""),
    ],
)
def test_a_wrong_field_is_one_clear_error(
    saved: Path, tmp_path: Path, key: str, value: Any
) -> None:
    data = {**json.loads(saved.read_bytes()), key: value}
    (tmp_path / "wrong.json").write_text(json.dumps(data))
    with pytest.raises(GraphFileError, match=r"wrong\.json"):
        rt.types.Form.load(tmp_path / "wrong.json")


@pytest.mark.parametrize(
    "change",
    [
        lambda regime: regime["formulas"][0].update(divisor=0),
        lambda regime: regime["formulas"][0]["terms"][0].__setitem__(0, 10**6),
        lambda regime: regime["formulas"].clear(),
        lambda regime: regime["slots"][0].update(path=["values", 10**6, "shape", 0]),
        lambda regime: regime["slots"][0].update(kind="unheard of", draw=7),
        lambda regime: regime.update(samples=[]),
        lambda regime: regime.update(samples=[[1]]),
        lambda regime: regime.update(low=[0, -8]),
        lambda regime: regime.update(high=[]),
    ],
)
def test_numbers_that_disagree_are_refused_whatever_the_digest_says(
    saved: Path, tmp_path: Path, change: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = json.loads(saved.read_bytes())
    change(next(r for r in data["regimes"] if r["formulas"]))
    monkeypatch.setattr(
        "rooftrace.studies.sweeps.evaluating._digest", lambda *parts: data["digest"]
    )
    (tmp_path / "wrong.json").write_text(json.dumps(data))
    with pytest.raises(GraphFileError, match=r"wrong\.json: regimes"):
        rt.types.Form.load(tmp_path / "wrong.json")


# -- sweeps that are stopped -----------------------------------------------------------------------


@pytest.fixture
def counted_parts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many parts were priced; a sweep is stopped before the one numbered `stop`."""
    counts = {"priced": 0, "stop": 10**6}

    def counting(*args: Any) -> Any:
        if counts["priced"] >= counts["stop"]:
            raise KeyboardInterrupt
        counts["priced"] += 1
        return evaluated(*args)

    monkeypatch.setattr(sweeps, "evaluated", counting)
    monkeypatch.setattr(sweeps, "_AT_ONCE", 100)
    return counts


def stopped(counts: dict[str, int], after: int, **asked: Any) -> None:
    counts["stop"] = after
    with pytest.raises(KeyboardInterrupt):
        rt.sweep(**asked)
    assert counts["priced"] == after
    counts.update(priced=0, stop=10**6)


@pytest.fixture(autouse=True)
def kept(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where parts are kept: not those of another test."""
    folder = tmp_path_factory.mktemp("kept")
    monkeypatch.setenv("ROOFTRACE_CACHE", str(folder))
    return folder


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_a_stopped_sweep_goes_on(
    form: rt.types.Form, tmp_path: Path, counted_parts: dict[str, int], suffix: str
) -> None:
    pandas = pytest.importorskip("pandas")
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    out = tmp_path / f"table{suffix}"
    asked: dict[str, Any] = dict(source=form, over=OVER, chip=["h200-sxm", "b200"], out=out)
    stopped(counted_parts, 3, **asked)
    assert not out.exists()
    resumed = rt.sweep(**asked)
    assert counted_parts["priced"] == 3  # of six
    whole = rt.sweep(form, over=OVER, chip=["h200-sxm", "b200"])
    pandas.testing.assert_frame_equal(resumed.frame(), whole.frame())
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    read = pandas.read_parquet(out) if suffix == ".parquet" else pandas.read_csv(out)
    frame = resumed.frame()
    assert list(read.columns) == list(frame.columns) and len(read) == len(frame) == 64 * 8 * 2
    for name in ("batch", "flops", "bytes_hbm", "peak_memory"):
        assert read[name].tolist() == frame[name].tolist()
    np.testing.assert_allclose(read["t_est"], frame["t_est"], rtol=1e-15)
    assert read["chip"].tolist() == frame["chip"].tolist()


@pytest.mark.parametrize(
    "other",
    [
        dict(over={"batch": [1, 3, 64], "0.1": 8}),
        dict(over={"batch": [1, 2, 64], "0.1": 8}, execution="eager"),
        dict(over={"batch": [1, 2, 64], "0.1": 8}, chip="b200-sxm"),
    ],
)
def test_parts_of_another_sweep_are_not_taken(
    form: rt.types.Form, tmp_path: Path, counted_parts: dict[str, int], other: dict[str, Any]
) -> None:
    first: dict[str, Any] = dict(over={"batch": [1, 2, 64], "0.1": 8}, dtype=[None, "bf16"])
    out = tmp_path / "table.csv"
    stopped(counted_parts, 1, source=form, out=out, **first)
    told = rt.sweep(form, out=out, **{**first, **other})
    assert counted_parts["priced"] == 2
    expected = rt.sweep(form, **{**first, **other})
    assert told.frame().equals(expected.frame())


def test_parts_of_another_form_are_not_taken(
    form: rt.types.Form, tmp_path: Path, counted_parts: dict[str, int]
) -> None:
    wide = rt.tools.form(nn.Linear(32, 8), torch.empty(2, 8, 32), over=OVER)
    out = tmp_path / "table.csv"
    stopped(counted_parts, 2, source=form, over=OVER, out=out)
    assert rt.sweep(wide, over=OVER, out=out).frame().equals(rt.sweep(wide, over=OVER).frame())


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04", b"\x93NUMPY", None])
def test_a_damaged_part_is_made_again(
    form: rt.types.Form,
    tmp_path: Path,
    kept: Path,
    counted_parts: dict[str, int],
    damage: bytes | None,
) -> None:
    out = tmp_path / "table.csv"
    stopped(counted_parts, 2, source=form, over=OVER, out=out)
    for part in kept.glob("*.npz"):
        part.write_bytes(part.read_bytes()[:-40] if damage is None else damage)
    told = rt.sweep(form, over=OVER, out=out)
    assert counted_parts["priced"] == 6
    assert told.frame().equals(rt.sweep(form, over=OVER).frame())


def test_another_ending_is_refused(form: rt.types.Form, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"\.parquet or \.csv"):
        rt.sweep(form, over=OVER, out=tmp_path / "table.xlsx")


def test_the_columns_of_a_part_are_those_of_the_form(form: rt.types.Form) -> None:
    points = points_of(form.names, {name: list(values)[:3] for name, values in OVER.items()})
    table = evaluated(form, points, [rt.load_chip("h200-sxm")], Conditions.of("efficient"))
    assert {len(column) for column in table.values()} == {9}
