"""Knob files: written, read back, refused."""

import math
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from rooftrace.costmodels.fusion.executions import ExecutionModel, execution_model
from rooftrace.costmodels.kernels.knobs import (
    CLASSES,
    Knobs,
    KnobsError,
    Share,
    Tiling,
    dump_knobs,
    load_knobs,
    shipped_knobs,
)

pytestmark = pytest.mark.quick

NUMBERS = st.floats(0.01, 100).map(lambda x: float(f"{x:.6g}"))
SHARES = st.builds(Share, NUMBERS, NUMBERS, st.sampled_from(["matrix", "vector"]), NUMBERS, NUMBERS)
KNOBS = st.builds(
    Knobs,
    st.text(max_size=20),
    NUMBERS,
    NUMBERS,
    st.just(math.inf) | st.floats(1, 20).map(lambda x: float(f"{x:.6g}")),
    st.none() | NUMBERS,
    st.none() | NUMBERS,
    NUMBERS,
    st.floats(1, 20).map(lambda x: float(f"{x:.6g}")),
    st.builds(Tiling, NUMBERS, NUMBERS, NUMBERS, st.just(math.inf) | NUMBERS),
    st.dictionaries(st.sampled_from(CLASSES), SHARES, max_size=4),
    st.dictionaries(st.text(max_size=8), st.text(max_size=8) | st.integers(0, 9), max_size=3),
)


@given(KNOBS)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, knobs: Knobs) -> None:
    path = tmp_path_factory.mktemp("knobs") / "k.toml"
    path.write_text(dump_knobs(knobs), encoding="utf-8")
    found = load_knobs(path)
    assert found == knobs and found.shares == knobs.shares and found.source == knobs.source


BAD = {
    "schema": ('schema = "other"\ntitle = "x"', "schema 'other': expected 'rooftrace.knobs/1'"),
    "title": ("", "title is missing"),
    "unknown knob": (
        'title = "x"\nspeed = 3',
        "unknown key 'speed': expected one of title, compute",
    ),
    "unknown class": ('title = "x"\n[share]\nmagic = { compute = 1.0 }', "share 'magic'"),
    "text for a number": ('title = "x"\ncompute = "fast"', "expected a number"),
    "not positive": (
        'title = "x"\nmemory = 0.0',
        "memory=0.0: expected a number of at least 1e-06",
    ),
    "nan": ('title = "x"\nmemory = nan', "memory=nan"),
    "overlap": ('title = "x"\noverlap = 0.5', "overlap=0.5: expected a number of at least 1"),
    "share": ('title = "x"\n[share]\nmm = { compute = -1.0 }', "share.mm: compute=-1.0: expected"),
    "engine": ('title = "x"\n[share]\nmm = { engine = "warp" }', "expected matrix or vector"),
    "not TOML": ("title = ", "not a readable knob file (Invalid value (at"),
    "a list for a text": ('title = ["x"]', "title=['x']: expected a text"),
    "a text of a share": ('title = "x"\n[share]\nmm = { compute = "x" }', "share.mm.compute='x'"),
    "an unknown key of a share": (
        'title = "x"\n[share]\nmm = { fast = 1 }',
        "share.mm: unknown key",
    ),
    "a list for a table": ('title = "x"\nshare = [1]', "share=[1]: expected a table"),
    "deep": (f'title = "x"\nsource = {{ a = {"[" * 200}{"]" * 200} }}', "64 deep"),
    "very deep": (f'title = "x"\nsource = {{ a = {"[" * 5000}{"]" * 5000} }}', "64 deep"),
    "a long number": (f'title = "x"\ncompute = {"9" * 5000}', "not a readable knob file"),
    "400 digits": (f'title = "x"\ncompute = {"9" * 400}', "more than 64 bits"),
}


@pytest.mark.parametrize(("text", "words"), BAD.values(), ids=BAD)
def test_a_bad_file_is_refused_with_its_name(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.toml"
    head = "" if text.startswith("schema") else 'schema = "rooftrace.knobs/1"\n'
    path.write_text(head + text, encoding="utf-8")
    with pytest.raises(KnobsError) as refused:
        load_knobs(path)
    assert words in str(refused.value) and "bad.toml" in str(refused.value)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(KnobsError, match=r"'nowhere\.toml': there is no such file"):
        load_knobs("nowhere.toml")


@pytest.mark.parametrize("name", shipped_knobs())
def test_knobs_that_come_along_are_read_by_name(name: str) -> None:
    knobs = load_knobs(name)
    assert 0 < knobs.memory <= knobs.compute <= 1 and knobs.source["from"]
    low, high = (end * knobs.spread for end in knobs.ends())
    assert low < -0.25 and high > 0.25  # nothing was fitted to the chip that they are for
    assert knobs.use == "no fit" and knobs.residuals == "usual"
    for use in ("no fit", "one factor", "fitted"):
        ends = knobs.residuals_of(use)
        assert ends is not None and not ends.few and ends.of
    assert all(0 < share.compute <= 1 and 0 < share.memory < 1.2 for share in knobs.shares.values())


def test_an_execution_model_carries_them() -> None:
    knobs = Knobs("mine", 0.9, shares={"mm": Share(0.8)})
    model = execution_model("compiled", knobs=knobs)
    again = ExecutionModel.from_dict(model.to_dict())
    assert again == model and again.knobs is not None and again.knobs.shares == knobs.shares


def test_shares_change_one_by_one() -> None:
    knobs = Knobs("x", shares={"mm": Share(0.5, 0.6)}).with_shares(memory={"mm": 0.7, "bmm": 0.9})
    assert knobs.share("mm") == Share(0.5, 0.7) and knobs.share("bmm") == Share(1.0, 0.9)
    assert knobs.share("conv") == Share()
