"""Measurements on disk: what is written comes back, and what is damaged is refused in one line."""

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rooftrace.errors import ProfileError
from rooftrace.graph.file import SCHEMA as GRAPH_SCHEMA
from rooftrace.measured.bench.runfile import (
    SCHEMA,
    MicroRow,
    ModelRow,
    OpTime,
    Run,
    Trouble,
    encoded,
)

pytestmark = pytest.mark.quick

MICRO = MicroRow(
    key="neg n=4",
    kind="elementwise",
    sizes={"n": 4},
    seconds=(2e-6, 1e-6, 4e-6),
    flops=4.0,
    bytes=32.0,
)
LAUNCH = MicroRow(key="launch", kind="launch", sizes={"what": "eager op"}, seconds=(3e-6,))
MODEL = ModelRow(
    key="net forward",
    model="net",
    phase="forward",
    mode="eager",
    sizes={"batch": 2},
    seconds=(0.5, 0.25),
    parameters=10,
    device_seconds=0.2,
    unattributed=0.05,
    source="replay",
    ops=(
        OpTime(
            target="aten.mm.default",
            seconds=0.1,
            count=2,
            id=7,
            module="layers.0",
            shapes=((2, 3), ((4,), ())),
            kernels=("gemm",),
        ),
        OpTime(target="aten.add.Tensor", seconds=0.05, count=1),
    ),
    peak_bytes=1000,
)
RUN = Run(
    device={"name": "chip", "type": "cpu", "memory_bytes": None},
    versions={"torch": "2.13.0"},
    dates=("2026-11-20",),
    settings={"quick": True},
    micro=(MICRO, LAUNCH),
    models=(MODEL,),
    troubles=(Trouble("a", "out of memory"), Trouble("b", "the budget ended", failed=False)),
    notes=("noisy",),
)


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_a_run_comes_back_as_it_was(tmp_path: Path, name: str) -> None:
    path = RUN.save(tmp_path / "new" / name)
    assert Run.load(path) == RUN
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")
    first = path.read_bytes()
    RUN.save(path)
    assert path.read_bytes() == first  # no time stamp in it
    assert os.listdir(path.parent) == [name]


def test_medians_sums_and_what_is_done() -> None:
    assert MICRO.median == 2e-6
    assert MODEL.median == 0.375
    assert MODEL.attributed == pytest.approx(0.2 - 0.05)
    assert RUN.done() == {"neg n=4", "launch", "net forward", "a"}  # not what was left out
    assert [t.key for t in RUN.errors] == ["a"]
    assert [t.key for t in RUN.skipped] == ["b"]


def test_a_row_takes_the_place_of_what_was_there() -> None:
    again = RUN.with_row(replace(MICRO, seconds=(9e-6,)))
    assert [row.median for row in again.micro] == [3e-6, 9e-6]
    tried = RUN.with_row(replace(MICRO, key="a"))
    assert [t.key for t in tried.troubles] == ["b"]
    assert len(tried.micro) == 3
    assert len(RUN.with_trouble("b", "failed").troubles) == 2


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path: Path, name: str) -> None:
    path = RUN.save(tmp_path / name)
    whole = path.read_bytes()
    for length in range(0, len(whole), max(1, len(whole) // 40)):
        path.write_bytes(whole[:length])
        with pytest.raises(ProfileError) as caught:
            Run.load(path)
        message = str(caught.value)
        assert str(path) in message and "\n" not in message and "measure" in message


def damaged(**changes: Any) -> dict[str, Any]:
    return {**json.loads(json.dumps(encoded(RUN))), **changes}


MICRO_DATA = json.loads(json.dumps(encoded(RUN)))["micro"][0]

DEEP: list[Any] = []
for _ in range(100):
    DEEP = [DEEP]

DAMAGE: dict[str, tuple[Any, str]] = {
    "another schema": (damaged(schema="rooftrace.run/0"), "rooftrace.run/0"),
    "a graph": ({"schema": GRAPH_SCHEMA, "graphs": {}}, GRAPH_SCHEMA),
    "a list": ([1, 2], SCHEMA),
    "no rows": ({"schema": SCHEMA, "device": {}, "versions": {}}, "micro is missing"),
    "an unknown field": (damaged(colour="blue"), "colour"),
    "an unknown field of a row": (
        damaged(micro=[{**MICRO_DATA, "second": 1}]),
        "micro[0]: unknown",
    ),
    "a text for a list": (damaged(notes="noisy"), "notes='noisy': expected a list"),
    "deep lists": (damaged(settings={"a": DEEP}), "64 deep"),
    "a long number": (damaged(settings={"a": 10**400}), "64 bits"),
    "rows that are none": (damaged(micro=[3]), "micro[0]=3: expected a table"),
    "a row without times": (damaged(micro=[{**MICRO_DATA, "seconds": []}]), "seconds of at least"),
    "a negative time": (damaged(micro=[{**MICRO_DATA, "seconds": [-1.0]}]), "-1.0"),
    "a time that is none": (damaged(micro=[{**MICRO_DATA, "seconds": [float("nan")]}]), "nan"),
    "a time in words": (damaged(micro=[{**MICRO_DATA, "seconds": ["1 ms"]}]), "1 ms"),
    "a count in words": (damaged(micro=[{**MICRO_DATA, "flops": "many"}]), "many"),
    "a truth for a number": (damaged(micro=[{**MICRO_DATA, "flops": True}]), "True"),
}


@pytest.mark.parametrize(("data", "word"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_refused(tmp_path: Path, data: Any, word: str) -> None:
    path = tmp_path / "run.json.gz"
    path.write_bytes(gzip.compress(json.dumps(data).encode()))
    with pytest.raises(ProfileError) as caught:
        Run.load(path)
    message = str(caught.value)
    assert word in message and str(path) in message and "measure" in message


def test_a_file_that_is_not_there_is_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Run.load(tmp_path / "none.json")


def test_a_run_that_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    path = RUN.save(tmp_path / "run.json")
    with pytest.raises(ValueError, match="JSON"):
        RUN.with_row(replace(MICRO, seconds=(float("inf"),))).save(path)
    assert Run.load(path) == RUN
    assert os.listdir(tmp_path) == ["run.json"]
