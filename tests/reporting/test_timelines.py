"""--timeline: the steps that a command rests on, in one file for Perfetto."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import rooftrace as rt
from rooftrace.reporting.commands.timelines import steps_of
from tests.reporting.conftest import Run

NET = """
import torch
def build(width=64):
    layers = torch.nn.Linear(64, width), torch.nn.GELU(), torch.nn.Linear(width, 64)
    return torch.nn.Sequential(*layers), (torch.ones(8, 64),)
def wide():
    return build(512)
"""
FORWARD = ("--phase", "forward", "--chip", "l4")
COMMANDS = {
    "report": ("report", "net.py:build", "--chip", "l4"),
    "diff": ("diff", "net.py:build", "net.py:wide", *FORWARD),
    "roofline": ("roofline", "net.py:build", "net.py:wide", *FORWARD),
    "explain": ("explain", "net.py:build", *FORWARD),
    "census": ("report", "net.py:build", "--table", "census", *FORWARD),
    "nodes": ("report", "net.py:build", "--table", "nodes", *FORWARD),
    "sweep": ("sweep", "net.py:build", "--over", "batch=1..64", *FORWARD),
    "solve": ("solve", "net.py:build", "--step", "1ms", "--over", "1..64", *FORWARD),
    "sensitivity": ("sensitivity", "net.py:build", "--over", "batch=16", *FORWARD),
}
BATCHES = {"sweep": 64, "solve": 64, "sensitivity": 16}
"""Of the steps of commands that change it."""


@pytest.fixture
def here(one_folder: Path) -> Path:
    (one_folder / "net.py").write_text(NET)
    return one_folder


def ends(path: Path) -> dict[str, float]:
    """By the name of each process: when its last slice ends, in seconds."""
    raw = path.read_bytes()
    document = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    names: dict[int, str] = {}
    last: dict[int, float] = defaultdict(float)
    for event in document["traceEvents"]:
        if event["name"] == "process_name":
            names[event["pid"]] = event["args"]["name"]
        if event["ph"] == "X":
            last[event["pid"]] = max(last[event["pid"]], event["ts"] + event["dur"])
    assert set(names) == set(last), "every process has slices, and every slice a named process"
    return {names[pid]: end / 1e6 for pid, end in last.items()}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_timeline_ends_when_its_step_does(name: str, here: Path, run: Run) -> None:
    ran = run(*COMMANDS[name], "--timeline", "steps.json.gz")
    assert ran.code == 0, ran.err
    assert ran.out.endswith("timeline written to steps.json.gz; open it in ui.perfetto.dev\n")
    found = ends(here / "steps.json.gz")
    batch = {"batch": BATCHES[name]} if name in BATCHES else {}
    expected: list[Any] = [rt.estimate("net.py:build", chip="l4", phase="forward", **batch)]
    if name in ("diff", "roofline"):
        expected.append(rt.estimate("net.py:wide", chip="l4", phase="forward"))
    if name == "report":
        expected = [
            rt.estimate("net.py:build", chip="l4", phase=phase, execution=execution)
            for phase in ("forward", "training")
            for execution in ("naive", "efficient")
        ]
    assert sorted(found.values()) == pytest.approx(sorted(e.t_est for e in expected), rel=1e-6)


def test_a_document_on_stdout_stays_one(here: Path, run: Run) -> None:
    ran = run(*COMMANDS["nodes"], "--format", "json", "--timeline", "a.json")
    assert json.loads(ran.out) and ends(here / "a.json")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("solve", "net.py:build", "--find", "rates"), "--find rates: its answer is no step"),
        (("sensitivity", "net.py:build", "--grid", "batch=1,2"), "a grid is many steps"),
        (("sweep", "net.py:build", "net.py:wide", "--over", "batch=1,2", "-o", "f"), "one TARGET"),
    ],
)
def test_where_no_step_is_one_line_says_so(
    command: tuple[str, ...], words: str, here: Path, run: Run
) -> None:
    ran = run(*command, "--timeline", "a.json")
    assert ran.code == 2 and words in ran.err and len(ran.err.splitlines()) == 1
    assert not (here / "a.json").exists()


def test_another_ending_is_refused_before_any_work(here: Path, run: Run) -> None:
    ran = run("report", "no_such_file.py:x", "--timeline", "a.txt")
    assert ran.code == 2 and "--timeline a.txt: expected a file that ends in .json" in ran.err


def test_a_result_without_steps_says_so() -> None:
    with pytest.raises(rt.types.RequestError, match="Chip: no step is in it"):
        steps_of(rt.load_chip("l4"))
