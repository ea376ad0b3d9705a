"""`report A B C`: a folder for each, one table and roofline with all, and failures by name."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

import rooftrace as rt
from rooftrace.reporting.commands.rooflinesteps import names_of
from tests.reporting.conftest import Run

pytestmark = pytest.mark.usefixtures("kept_targets")

NET = """
import torch
def build(width=64):
    layers = torch.nn.Linear(64, width), torch.nn.GELU(), torch.nn.Linear(width, 64)
    return torch.nn.Sequential(*layers), (torch.ones(8, 64),)
def wide():
    return build(512)
def broken():
    raise ValueError("no such <b>layer</b>")
"""
ASKED = ("--phase", "forward", "--chip", "l4")


@pytest.fixture
def here(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


def test_each_has_its_folder_and_all_have_one_table(here: Path, run: Run) -> None:
    ran = run("report", "net.py:build", "net.py:wide", *ASKED, "--out", "out")
    assert ran.code == 0, ran.err
    assert {path.name for path in (here / "out").iterdir()} == {
        *("net.py_build", "net.py_wide", "roofline.png", "_comparison.json"),
        *(f"comparison.{ending}" for ending in ("html", "md", "json", "csv")),
    }
    alone = run("report", "net.py:wide", *ASKED, "--out", "-", "--format", "json")
    both = json.loads((here / "out" / "net.py_wide" / "report.json").read_text())
    assert both == json.loads(alone.out)
    rows = list(csv.DictReader((here / "out" / "comparison.csv").open()))
    assert [row["model"] for row in rows] == ["net.py_build", "net.py_wide"]
    for row, target in zip(rows, ("net.py:build", "net.py:wide"), strict=True):
        there = rt.estimate(target, phase="forward", chip="l4")
        assert float(row["t_est"]) == pytest.approx(there.t_est)
        assert int(row["batch"]) == 8
    assert "![all steps on one roofline](roofline.png)" in (here / "out/comparison.md").read_text()
    assert "data:image/png;base64," in (here / "out/comparison.html").read_text()


def test_one_that_fails_leaves_the_others_and_is_named(here: Path, run: Run) -> None:
    targets = ("net.py:build", "net.py:broken", "net.py:missing", "net.py:wide")
    ran = run("report", *targets, *ASKED, "--out", "out", "--format", "html,json,tex")
    assert ran.code == 1
    said = ran.err.splitlines()
    assert [line.partition(" failed: ")[0] for line in said] == [
        "rooftrace: net.py:broken",
        "rooftrace: net.py:missing",
    ]
    assert (here / "out/net.py_build/report.tex").is_file()
    assert (here / "out/net.py_wide/report.html").is_file()
    assert not (here / "out/net.py_broken").exists()
    told = json.loads((here / "out/comparison.json").read_text())
    assert list(told["failures"]) == ["net.py:broken", "net.py:missing"]
    assert len(told["steps"]) == 2
    page = (here / "out/comparison.html").read_text()
    assert "data:image/png" not in page  # no PNG was asked for
    assert "no such" in page and "<b>layer" not in page


def test_all_that_fail_write_no_figure(here: Path, run: Run) -> None:
    ran = run("report", "net.py:broken", "net.py:missing", *ASKED)
    assert ran.code == 1 and len(ran.err.splitlines()) == 2 and not ran.out


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (("--out", "one.html"), "--out one.html: it is for one TARGET, and 2 are named"),
        (("--out", "-", "--format", "json"), "--out -: it is for one TARGET"),
        (("--format", "json"), "--format json: it is for one TARGET"),
        (("--chip", "l5"), "l5"),
    ],
)
def test_a_wrong_request_is_said_before_any_work(
    how: tuple[str, ...], words: str, here: Path, run: Run
) -> None:
    ran = run("report", "net.py:build", "net.py:wide", *how)
    assert ran.code == 2 and words in ran.err and len(ran.err.splitlines()) == 1


def test_names_stand_in_the_table_and_the_figure_and_folders_keep_theirs(
    here: Path, run: Run
) -> None:
    asked = ("report", "net.py:build", "net.py:wide", *ASKED)
    ran = run(*asked, "--names", "Narrow net,Wide net", "--out", "out", "--format", "csv,svg")
    assert (
        ran.code == 0 and "Wide net" in ran.out and "net.py_wide" not in ran.out.split("\nin ")[0]
    )
    rows = list(csv.DictReader((here / "out" / "comparison.csv").open()))
    assert [row["model"] for row in rows] == ["Narrow net", "Wide net"]
    assert (here / "out" / "net.py_wide" / "ops.csv").is_file()
    assert "Wide net" in (here / "out" / "roofline.svg").read_text()
    for names in ("One", "Same,Same"):
        ran = run(*asked, "--names", names)
        assert ran.code == 2 and f"names {names!r}: expected 2 names, one for each" in ran.err


def test_none_and_one_twice_are_refused(here: Path, run: Run) -> None:
    assert "Missing argument" in run("report").err
    ran = run("report", "net.py:build", "net.py:build", *ASKED)
    assert ran.code == 2 and "net.py:build: it is there 2 times" in ran.err


def test_names_of_folders_tell_targets_apart() -> None:
    targets = ["a/config.json", "b/config.json", "net.py:build", "hf:org/name", "..", "comparison"]
    names = names_of(targets)
    assert len(set(names.values())) == len(targets)
    assert not any("/" in name or name.startswith(".") for name in names.values())
    assert names["net.py:build"] == "net.py_build" and names["hf:org/name"] == "name"


def test_python_has_the_same(here: Path) -> None:
    result = rt.tools.reports(["net.py:build", "net.py:wide"], phases=["forward"], chip="l4")
    assert result.roofline is not None and len(result.roofline.rows) == 2
    assert "net.py_wide" in str(result) and not result.failures
